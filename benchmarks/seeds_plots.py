"""The plots of the five questions: one of all, and one for each with the times that were reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results_files import Row
from benchmarks.seeds_workloads import SEEDS

KINDS = {"training": "one training step", "inference": "one call in evaluation mode"}

COLOURS = {"ampopt": "#8957e5", "fp32": "#24292f"}
OTHERS, REPORTED = "#7d9fc4", "#e0a878"
"""Colours of the default call and of FP32 in eager, of the other ways, and of what was reported."""


class Bar(NamedTuple):
    """A time in ms."""

    label: str
    ms: float
    colour: str


def draw(rows: Sequence[Row], folder: Path) -> None:
    """`seeds.png` of all questions, and `seeds-s1.png` and so on of each; none of what did not run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _draw_all(plt, rows, folder / "seeds.png")
    for question in dict.fromkeys(row["question"] for row in rows):
        ran = [row for row in rows if row["question"] == question and "training" in row]
        if ran:
            _draw_question(plt, ran, folder / f"seeds-{question.lower()}.png")


def _draw_question(plt: Any, rows: Sequence[Row], path: Path) -> None:
    """The milliseconds of every way, training on the left and calls on the right, a row for each workload."""
    bars = [(_steps(row), _of(row["inference"])) for row in rows]
    most = max(len(each) for pair in bars for each in pair)
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(11, len(rows) * (0.6 + 0.25 * most)), squeeze=False, layout="constrained"
    )
    for row, pair, places in zip(rows, bars, axes, strict=True):
        for axis, shown, kind in zip(places, pair, KINDS.values(), strict=True):
            _times(axis, shown)
            axis.set_title(f"{row['workload']}: {kind}", fontsize=9, loc="left")
    device = rows[0]["environment"].get("device", "?")
    figure.supxlabel(f"ms on {device}; in orange as it was reported, on its own device", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _of(ways: Mapping[str, Row]) -> list[Bar]:
    """The bars of what did not fail."""
    return [
        Bar(way, found["p50_ms"], COLOURS.get(way, OTHERS))
        for way, found in ways.items()
        if "p50_ms" in found
    ]


def _steps(row: Row) -> list[Bar]:
    """The bars of a training step, and of its parts that were reported, each before the reported ones."""
    reported = SEEDS[row["workload"]].reported
    parts = [part for part in row["parts"] if any(each.part == part for each in reported)]
    ways = [(bar, "step", bar.label) for bar in _of(row["training"])]
    ways += [(Bar(f"{part} of fp32", row["parts"][part], OTHERS), part, "fp32") for part in parts]
    bars: list[Bar] = []
    for bar, part, way in ways:
        mine = [each for each in reported if (each.part, each.way) == (part, way)]
        bars += [bar, *(Bar(f"reported, {each.device}", each.ms, REPORTED) for each in mine)]
    return bars


def _times(axis: Any, bars: Sequence[Bar]) -> None:
    """Horizontal bars with their figures, the first on top."""
    places = range(len(bars))
    axis.barh(places, [bar.ms for bar in bars], height=0.7, color=[bar.colour for bar in bars])
    for place, bar in enumerate(bars):
        axis.text(bar.ms, place, f" {bar.ms:.3g}", va="center", fontsize=7)
    axis.set_xlim(0, 1.12 * max((bar.ms for bar in bars), default=1.0))
    axis.set_yticks(places, [bar.label for bar in bars], fontsize=7)
    axis.tick_params(axis="x", labelsize=7)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def _draw_all(plt: Any, rows: Sequence[Row], path: Path) -> None:
    """How many times faster than FP32 each way of training and each call is: bars for each workload."""
    by_kind = {kind: [row for row in rows if "p50_ms" in row.get(kind, {}).get("fp32", {})] for kind in KINDS}
    drawn = {kind: ran for kind, ran in by_kind.items() if ran}
    if not drawn:
        return
    figure, axes = plt.subplots(len(drawn), figsize=(11, 4.5 * len(drawn)), squeeze=False)
    for axis, (kind, ran) in zip(axes[:, 0], drawn.items(), strict=True):
        _bars(axis, ran, kind)
        axis.set_ylabel(f"FP32 / it, {KINDS[kind]}")
    first = next(iter(drawn.values()))[0]
    axes[0, 0].set_title(f"When mixed precision pays, on {first['environment'].get('device', '?')}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, ran: Sequence[Row], kind: str) -> None:
    """A group of bars for each workload; each begins at FP32's own time."""
    names = [name for name in dict.fromkeys(way for row in ran for way in row[kind]) if name != "fp32"]
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        shown = [(i, row[kind][name]) for i, row in enumerate(ran) if "p50_ms" in row[kind].get(name, {})]
        heights = [ran[i][kind]["fp32"]["p50_ms"] / found["p50_ms"] - 1 for i, found in shown]
        places = [i + (place - len(names) / 2 + 0.5) * width for i, _ in shown]
        axis.bar(places, heights, width, bottom=1, label=name)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    labels = [f"{row['question']} {row['workload']}" for row in ran]
    axis.set_xticks(range(len(ran)), labels, fontsize=8, rotation=20, ha="right")
    axis.legend(fontsize=8, ncols=2)
