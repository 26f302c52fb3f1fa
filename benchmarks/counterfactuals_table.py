"""The table of counterfactuals: what `diagnose` said beside the same alone, and the share that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import cold_lines
from benchmarks.results_files import Row, heading

TOLERATED = 0.1
"""A figure differs if it is further from what was measured alone than this share of that."""

SIDES = ("before", "after")


def difference(figure: Mapping[str, Any], by: str = "ms") -> float:
    """How far a diagnosed figure is from the same one alone, as a share of that."""
    return float(figure["diagnosed"][by] / figure["alone"][by] - 1)


def differs(counterfactual: Mapping[str, Any], by: str = "ms") -> bool:
    """Whether one of the two figures differs: by their medians, or `by` the "tenth"."""
    return any(abs(difference(counterfactual[side], by)) > TOLERATED for side in SIDES)


def certainly_differs(counterfactual: Mapping[str, Any]) -> bool:
    """Whether one of them differs wherever in their intervals both are."""
    return any(_gap(counterfactual[side]) > TOLERATED for side in SIDES)


def _gap(figure: Mapping[str, Any]) -> float:
    """The least difference that the intervals leave, as a share of what was measured alone."""
    ours, alone = figure["diagnosed"], figure["alone"]
    below, above = 1 - ours["high"] / alone["low"], ours["low"] / alone["high"] - 1
    return float(max(below, above, 0.0))


def gain_differs(counterfactual: Mapping[str, Any]) -> bool:
    """Whether alone it is faster by another factor than was said: a drift of the machine cancels."""
    said = float(counterfactual["gain"]["ratio"])
    return abs(said / _gain_alone(counterfactual) - 1) > TOLERATED


def _gain_alone(counterfactual: Mapping[str, Any]) -> float:
    before, after = (counterfactual[side]["alone"]["ms"] for side in SIDES)
    return float(before / after)


def measured(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The counterfactuals of all rows whose both figures were measured."""
    every = [each for row in rows for each in row.get("counterfactuals", [])]
    return [each for each in every if all("alone" in each[side] for side in SIDES)]


def to_markdown(rows: Sequence[Row]) -> str:
    """The rows as a table, and the shares."""
    figures = (*("before: said", "alone", "off"), *("after: said", "alone", "off"), *("gain: said", "alone"))
    head = ("network", "finding", *figures, "clock", "load", "commit")
    lines = [*heading("Counterfactuals of `diagnose` beside the same thing alone", rows), ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        for each in measured([row]):
            load = "–" if row["load"] is None else f"{row['load']:.1f}"
            cells = (row["network"], f"{each['finding']} ({each['lane']})", *_cells(each))
            lines.append("| " + " | ".join((*cells, row["clock"], load, row["commit"])) + " |")
    lines += [
        "",
        "Milliseconds; *off*: how far what was said is from what was measured alone.",
        *_clocks(rows),
        "",
    ]
    return "\n".join([*lines, *_said(rows), *cold_lines.lines(rows)]) + "\n"


def _clocks(rows: Sequence[Row]) -> list[str]:
    if all(row.get("clock") != "cpu" for row in rows):
        return []
    return ["Of the clock *cpu*, they are the processor's time for a call, in one thread beside other load."]


def _cells(each: Mapping[str, Any]) -> Iterator[str]:
    for side in SIDES:
        figure = each[side]
        off = difference(figure)
        shown = f"{off:+.0%}"
        yield from (_ms(figure["diagnosed"]), _ms(figure["alone"]))
        yield f"**{shown}**" if abs(off) > TOLERATED else shown
    yield from (f"{each['gain']['ratio']:.2f}", f"{_gain_alone(each):.2f}")


def _ms(figure: Mapping[str, float]) -> str:
    return f"{figure['ms']:.3g} ({figure['low']:.3g} to {figure['high']:.3g})"


def _said(rows: Sequence[Row]) -> Iterator[str]:
    found = measured(rows)
    if found:
        yield f"- Of {len(found)} counterfactuals differ in a figure by more than {TOLERATED:.0%}:"
        counts = {
            "by their medians": sum(map(differs, found)),
            "wherever in their intervals both medians are": sum(map(certainly_differs, found)),
            "by the fastest tenth of the calls, which other load of the machine disturbs least": sum(
                differs(each, "tenth") for each in found
            ),
            "by how many times faster they are, from which a drift of the machine cancels": sum(
                map(gain_differs, found)
            ),
        }
        yield from (f"  - {says}: {count} ({count / len(found):.0%})" for says, count in counts.items())
    for row in rows:
        if "error" in row:
            yield f"- {row['network']}: {row['error']}"
        for each in row.get("counterfactuals", []):
            for side in SIDES:
                if "error" in each[side]:
                    yield f"- {row['network']}, {each[side]['way']}: {each[side]['error']}"
        if row.get("not_measured"):
            yield f"- {row['network']}: not measured alone: {', '.join(row['not_measured'])}"
