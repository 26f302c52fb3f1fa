"""The report of `optimize` as a document: the verdict, each lane, what each pass changed, the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from ampopt.document.model import (
    Bar,
    Bars,
    Cell,
    Column,
    Document,
    Facts,
    Figure,
    Line,
    Lines,
    Listing,
    Part,
    Points,
    Section,
    Span,
    Table,
    Tone,
    Waterfall,
)
from ampopt.measure.entry import ORIGINAL, Entry, Timing, Verdict
from ampopt.measure.report import CALLED_NOW, COLUMNS, interval, row, told
from ampopt.measure.sampling import Gain, Measurement

if TYPE_CHECKING:
    from ampopt.measure.ledger import LaneSummary, Ledger

TONES: dict[Verdict, Tone] = {
    Verdict.KEPT: "good",
    Verdict.REVERTED: "warn",
    Verdict.DECLINED: "faint",
    Verdict.FAILED: "bad",
    Verdict.NOT_TRIED: "note",
}

LANE_COLUMNS = (
    "lane", "verdict", "eager p50 ms", "optimized p50 ms", "p99 ms", "device ms", "gain", "error",
    "eager's error", "memory MB", "made of",
)  # fmt: skip

CLOCKS: dict[Literal["latency", "device"], str] = {
    "latency": "latency of a call, ms",
    "device": "device time (kernels only), ms",
}
"""Both clocks, with the label of their axes."""


def to_document(ledger: Ledger) -> Document:
    """The ledger as a document; parts of a model follow the whole."""
    verdict, tone = _verdict(ledger)
    device = ledger.environment.get("device", "?")
    return Document(
        title=f"optimize: {ledger.model}",
        subtitle=f"on {device}, inputs {', '.join(ledger.inputs)}",
        verdict=verdict,
        tone=tone,
        sections=(
            *_sections(ledger),
            Section("Environment", (Facts(tuple(_facts(ledger))),)),
            *_regions(ledger),
        ),
        data=ledger.to_dict(),
        figures=tuple(_figures(ledger)),
    )


def _verdict(ledger: Ledger) -> tuple[str, Tone]:
    if ledger.lanes and not ledger.verified:
        return "No optimized program could be verified: the original model answers.", "bad"
    if ledger.chosen == ORIGINAL:
        return "Nothing is faster and verified: the original model answers.", "warn"
    if ledger.chosen is None or ledger.gain is None:
        return "No lane was chosen.", "warn"
    tone: Tone = "good" if ledger.gain.at_least > 1 or ledger.gain.is_surely_faster else "warn"
    return f"{ledger.chosen} lane: {told(ledger.gain, CALLED_NOW, ledger.load)}.", tone


def _figures(ledger: Ledger) -> Iterator[Figure]:
    lane = ledger.lanes.get(ledger.chosen or "")
    if lane is not None and ledger.gain is not None:
        label, value = "faster, at least", f"{ledger.gain.at_least:.2f}×"
        if ledger.gain.is_vague and ledger.gain.is_surely_faster:
            label, value = "faster", "factor unclear"
        yield Figure(label, value, f"{interval(ledger.gain)} measured")
    if ledger.baseline is not None:
        yield Figure(CALLED_NOW, f"{_ms(ledger.baseline)} ms", _p99(ledger.baseline))
    if lane is not None:
        yield Figure("optimized", f"{_ms(lane.best)} ms", _p99(lane.best))
        if lane.device is not None:
            yield Figure("device time", f"{_ms(lane.device)} ms", "kernels only")
        eager = "" if lane.eager_error is None else f"eager's {lane.eager_error:.1e}"
        yield Figure("relative error", f"{lane.error:.1e}", eager)
    if ledger.seconds:
        yield Figure("took", f"{ledger.seconds:.0f} s", f"{len(ledger.entries)} trials")


def _sections(ledger: Ledger) -> Iterator[Section]:
    lanes = list(ledger.lanes.values())
    yield Section("Notes", (Points(tuple(ledger.notes)),) if ledger.notes else ())
    refused = tuple(f"{lane.lane} lane REFUSED: {lane.refused}" for lane in lanes if lane.refused)
    why = (Points(refused),) if refused else ()
    yield Section("Lanes", (*why, _lanes_table(ledger, lanes), _lanes_plot(lanes)) if lanes else ())
    for lane in dict.fromkeys(entry.lane for entry in ledger.entries):
        entries = [entry for entry in ledger.entries if entry.lane == lane]
        yield Section(f"What each pass changed: {lane} lane", tuple(_waterfalls(entries)))
    yield Section("Best so far", tuple(_best_so_far(ledger)))
    yield Section("All passes", (_passes_table(ledger.entries),) if ledger.entries else ())
    yield Section("Error of each output", tuple(_outputs_table(lanes)))
    yield Section("The graph before and after", tuple(_graphs(ledger)), is_folded=True)


def _outputs_table(lanes: Sequence[LaneSummary]) -> Iterator[Table]:
    rows: list[list[str | Cell]] = []
    for lane in lanes:
        for output in lane.outputs:
            errors = (Cell(f"{error:.1e}", error) for error in (output.error, output.eager_error))
            shape = "x".join(map(str, output.shape)) or "a number"
            rows.append([lane.lane, output.name, shape, *errors])
    if rows:
        yield Table.of(("lane", "output", "shape", "error", "eager's error"), rows)


def _graphs(ledger: Ledger) -> Iterator[Listing]:
    """Both graphs; what only one of them has is marked."""
    before, after = ledger.graphs
    for title, own, others, mark in (("before", before, after, "-"), ("after", after, before, "+")):
        if own:
            known = set(others)
            lines = tuple(f"{' ' if line in known else mark} {line}" for line in own)
            yield Listing(f"{title}: {len(own)} lines", lines)


def _regions(ledger: Ledger) -> Iterator[Section]:
    for name, region in ledger.regions.items():
        yield Section(f"Submodule {name}", (Points((_verdict(region)[0],)),))
        for section in _sections(region):
            yield dataclasses.replace(section, heading=f"Submodule {name}: {section.heading}", is_folded=True)
        yield from _regions(region)


def _lanes_table(ledger: Ledger, lanes: Sequence[LaneSummary]) -> Table:
    rows = []
    for lane in lanes:
        state = Cell("usable")
        if lane.refused is not None:
            state = Cell("refused", tone="bad")
        elif lane.lane == ledger.chosen:
            state = Cell("chosen", tone="good")
        whose = f"the {lane.answered_by} lane's program: " if lane.answered_by else ""
        made = f"{whose}{' + '.join(lane.passes) or 'no pass helped'}"
        memory = "–" if lane.memory is None else f"{lane.memory / 1e6:.1f}"
        rows.append(
            (
                f"{lane.lane} ({lane.dtype})",
                state,
                _ms(lane.eager),
                _ms(lane.best),
                _ms_or_dash(lane.best.quantile(0.99)),
                "–" if lane.device is None else _ms(lane.device),
                "–" if lane.gain is None else _gain(lane.gain),
                f"{lane.error:.1e}",
                "–" if lane.eager_error is None else f"{lane.eager_error:.1e}",
                memory,
                made,
            )
        )
    return Table.of(LANE_COLUMNS, rows)


def _lanes_plot(lanes: Sequence[LaneSummary]) -> Bars:
    bars = []
    for lane in lanes:
        bars.append(Bar(f"{lane.lane} eager", 1e3 * lane.eager.median))
        tone: Tone = "good" if lane.refused is None else "bad"
        bars.append(Bar(f"{lane.lane} optimized", 1e3 * lane.best.median, tone=tone))
        if lane.device is not None:
            bars.append(Bar(f"{lane.lane} device time", 1e3 * lane.device.median, tone="note"))
    return Bars("Eager and optimized, both clocks", "median, ms", tuple(bars))


def _waterfalls(entries: Sequence[Entry]) -> Iterator[Part]:
    """A waterfall on each clock that timed something."""
    for clock, unit in CLOCKS.items():
        spans = [
            Span(entry.name, before, after, TONES[entry.verdict], entry.verdict is Verdict.KEPT)
            for entry in entries
            if (before := _clock(entry.before, clock)) is not None
            and (after := _clock(entry.after, clock)) is not None
        ]
        if spans:
            yield Waterfall("Before → after each pass; pale: not kept", unit, tuple(spans))


def _clock(timing: Timing | None, clock: Literal["latency", "device"]) -> float | None:
    if timing is None:
        return None
    measured = timing.latency if clock == "latency" else timing.device
    return None if measured is None else 1e3 * measured.median


def _best_so_far(ledger: Ledger) -> Iterator[Part]:
    steps = ledger.steps_to_best()
    if not steps:
        return
    rows = [(f"{s.at_s:.1f}", f"{1e3 * s.latency_s:.3f}", s.lane, s.name) for s in steps]
    x, y = [step.at_s for step in steps], [1e3 * step.latency_s for step in steps]
    if ledger.seconds > x[-1]:
        x, y = [*x, ledger.seconds], [*y, y[-1]]
    line = Line("best so far", tuple(x), tuple(y), is_steps=True)
    yield Lines("The fastest program found so far", "seconds of search", "latency, ms", (line,))
    yield Table.of(("after s", "latency ms", "lane", "pass"), rows)


def _passes_table(entries: Sequence[Entry]) -> Table:
    numbers = {"latency ms", "device ms", "gain", "error", "limit", "took"}
    names = [*COLUMNS[:-2], "limit", *COLUMNS[-2:]]
    columns = tuple(Column(name, name in numbers) for name in names)
    rows = []
    for entry in entries:
        cells = [Cell(text) for text in row(entry)]
        cells[2] = Cell(entry.verdict.value, tone=TONES[entry.verdict])
        for place, clock in ((3, "latency"), (4, "device")):
            after = _clock(entry.after, "latency" if clock == "latency" else "device")
            cells[place] = dataclasses.replace(cells[place], value=after)
        cells.insert(-2, Cell("–" if entry.limit is None else f"{entry.limit:.1e}"))
        rows.append(tuple(cells))
    return Table(columns, tuple(rows), is_filtered=True)


def _facts(ledger: Ledger) -> Iterator[tuple[str, str]]:
    yield from ledger.environment.items()
    if ledger.load is not None:
        yield "load average", f"{ledger.load.average:.1f} on {ledger.load.cores} cores"
    if ledger.control is not None:
        yield "the original over itself", f"{ledger.control.ratio:.2f}x, {interval(ledger.control)}"


def _ms(measured: Measurement) -> str:
    return f"{1e3 * measured.median:.3f}"


def _ms_or_dash(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3f}"


def _p99(measured: Measurement) -> str:
    p99 = measured.quantile(0.99)
    return "median" if p99 is None else f"median; p99 {1e3 * p99:.3f} ms"


def _gain(gain: Gain) -> str:
    return f"{gain.ratio:.2f}x, {interval(gain)}"
