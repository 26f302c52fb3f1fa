"""The report of `compare` as a document: what each pass brings, and what changed since an earlier run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampopt.document.model import Bar, Bars, Cell, Document, Facts, Part, Points, Section, Table, Tone
from ampopt.measure.changes import Change, Changes
from ampopt.measure.report import interval
from ampopt.measure.sampling import Gain

if TYPE_CHECKING:
    from ampopt.measure.compared import ComparedPass, Comparison

MODES = ("alone", "cumulative", "left out")

LEGEND = (
    "Median latency in ms and the factor that the pass brings (above 1: it helps) with its interval; "
    'where that holds 1 there is "no difference", and where it is too wide the machine is too busy.'
)

CHANGE_TONES: dict[str, Tone] = {
    "slower": "bad",
    "fails now": "bad",
    "fails in both": "note",
    "faster": "good",
    "no difference": "faint",
    "only then": "note",
    "only now": "note",
}


def to_document(found: Comparison, changed: Changes | None = None) -> Document:
    """A comparison as a document; what `changed` comes first."""
    verdict, tone = _verdict(found) if changed is None else _verdict_of_changes(changed)
    sections = [*_changes(changed)] if changed is not None else []
    data = found.to_dict()
    return Document(
        title=f"compare: {found.model}",
        subtitle=f"on {found.environment['device']}, inputs {', '.join(found.inputs)}",
        verdict=verdict,
        tone=tone,
        sections=(*sections, *_sections(found)),
        data=data if changed is None else {**data, "changes": changed.to_dict()},
    )


def _verdict(found: Comparison) -> tuple[str, Tone]:
    """What helps most where the others are, too; nothing does by a wrong program, or beside one."""
    timed = [row for row in found.rows if row.mode == "left out" and row.gain is not None]
    helping = [row for row in timed if not row.reason and _at_least(row) > 1]
    if not helping and timed and all(row.is_wrong for row in timed):
        return f"No pass helps where all others are: what they make is wrong {timed[0].reason}.", "bad"
    if not helping:
        return "No pass makes the whole sequence faster by more than its interval.", "plain"
    best = max(helping, key=_at_least)
    names = {row.name for row in helping}
    count = f"{len(names)} passes help" if len(names) > 1 else "1 pass helps"
    most = f"{best.name} most, at least {_at_least(best):.2f}x in the {best.lane} lane"
    return f"{count} where all others are: {most}.", "good"


def _verdict_of_changes(changed: Changes) -> tuple[str, Tone]:
    limit = f"{changed.threshold:g}x"
    if worse := changed.regressions:
        rows = f"{len(worse)} rows are" if len(worse) > 1 else "1 row is"
        more = _not_compared(len(changed.missing))
        return f"FAILED: {rows} slower than the baseline by more than {limit}, or failing{more}.", "bad"
    faster = sum(row.outcome == "faster" for row in changed.rows)
    both = len(changed.compared)
    if left := len(changed.interrupted):
        more = _not_compared(len(changed.missing) - left, " more")
        return f"NOT PASSED: interrupted before {_rows(left)} of the baseline{more}.", "bad"
    if not both:
        return "Nothing was measured in both runs: a longer --budget would fill more rows.", "warn"
    more = f"; {faster} faster by more than that" if faster else ""
    more += _not_compared(len(changed.missing))
    return f"passed: of {both} rows none is slower than the baseline by more than {limit}{more}.", "good"


def _not_compared(count: int, more: str = "") -> str:
    """How many rows of the baseline this run has not measured, as the end of a verdict."""
    if not count:
        return ""
    return f"; {_rows(count)}{more} of the baseline {'is' if count == 1 else 'are'} not compared"


def _rows(count: int) -> str:
    return f"{count} rows" if count > 1 else "1 row"


def _notes_on(changed: Changes) -> Iterator[str]:
    """What is missing in either run."""
    if count := len(changed.missing):
        were = "was" if count == 1 else "were"
        yield (
            f"{_rows(count)} of the baseline {were} not measured in this run, and nothing is known of them: "
            '"only then" in the table, with the reason'
        )
    if changed.was_interrupted:
        yield (
            "the baseline is of a run that was interrupted: it lacks rows, or its times are less sure. "
            "Make it anew"
        )


def _changes(changed: Changes) -> Iterator[Section]:
    ordered = sorted(changed.rows, key=lambda row: -(row.ratio or 0.0))
    both = [row for row in ordered if row.ratio is not None]
    shown = [row for row in ordered if row.outcome != "no difference"]
    columns = ("lane", "mode", "pass", "outcome", "then ms", "now ms", "now/then", "interval", "why")
    notes = tuple(_notes_on(changed))
    parts: list[Part] = [Points(notes)] if notes else []
    if bars := [_bar_of_change(row) for row in shown if row.ratio is not None]:
        parts.append(Bars("Latency now over the baseline's", "times", tuple(bars), origin=1))
    if shown:
        parts.append(Table.of(columns, [_change_cells(row) for row in shown]))
    yield Section("What changed since the baseline", tuple(parts))
    alike = [_change_cells(row) for row in both if row.outcome == "no difference"]
    yield Section("No difference from the baseline", (Table.of(columns, alike),) if alike else (), True)
    differs = Table.of(("environment", "then", "now"), changed.environment)
    yield Section("Environments", (differs,) if changed.environment else ())


def _change_cells(row: Change) -> tuple[str | Cell, ...]:
    ratio = "–" if row.times is None else f"{row.times.ratio:.2f}x"
    ends = "–" if row.times is None else interval(row.times)
    times = ("–" if value is None else f"{value:.3f}" for value in (row.then_ms, row.now_ms))
    outcome = Cell(row.outcome, tone=CHANGE_TONES[row.outcome])
    return row.lane, row.mode, row.name, outcome, *times, ratio, ends, row.reason


def _bar_of_change(row: Change) -> Bar:
    label, tone = f"{row.name}, {row.lane} {row.mode}", CHANGE_TONES[row.outcome]
    return Bar(label, row.ratio or 1.0, row.low, row.high, tone)


def _sections(found: Comparison) -> Iterator[Section]:
    yield Section("Notes", (Points(found.notes),) if found.notes else ())
    for lane in dict.fromkeys(row.lane for row in found.rows):
        rows = [row for row in found.rows if row.lane == lane]
        yield Section(f"What each pass brings: {lane} lane", (*_effects(rows), _table(rows)))
    yield Section("How to read it", (Points((LEGEND,)),))
    yield Section("Environment", (Facts(tuple(found.environment.items())),))


def _effects(rows: list[ComparedPass]) -> Iterator[Part]:
    for mode in MODES:
        right = [row for row in rows if row.mode == mode and not row.is_wrong]
        timed = [(row.name, row.gain) for row in right if row.gain is not None]
        if bars := tuple(Bar(n, g.ratio, g.low, g.high, _tone(g)) for n, g in timed if not g.is_vague):
            yield Bars(f"{mode}: times faster with the pass", "times, with the interval", bars, origin=1)


def _table(rows: list[ComparedPass]) -> Table:
    cells = {(row.name, row.mode): _cell(row) for row in rows}
    names = dict.fromkeys(row.name for row in rows)
    made = Table.of(
        ("pass", *MODES), [(name, *(cells.get((name, mode), "–") for mode in MODES)) for name in names]
    )
    return Table(made.columns, made.rows, is_filtered=True)


def _cell(row: ComparedPass) -> Cell:
    """A row as a cell; sorted by what the pass brings."""
    return Cell(row.told(), None if row.gain is None else row.gain.ratio)


def _tone(gain: Gain) -> Tone:
    return "good" if gain.at_least > 1 else "bad" if gain.is_loss else "faint"


def _at_least(row: ComparedPass) -> float:
    return 1.0 if row.gain is None else row.gain.at_least
