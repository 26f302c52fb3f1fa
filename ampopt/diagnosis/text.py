"""A diagnosis for a terminal of 80 columns: the verdict, the findings, the slowest layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampopt.diagnosis.finding import milliseconds
from ampopt.diagnosis.layers import OPTIMIZED
from ampopt.diagnosis.sweep import crossings_told
from ampopt.diagnosis.training_step import PARTS
from ampopt.document.printable import safe_text
from ampopt.measure.terminal import as_text

if TYPE_CHECKING:
    from ampopt.diagnosis.result import Diagnosis

WIDTH = 80
"""The width of plain text, in characters."""

NAME = 34
"""Characters of a kernel's name that are shown."""

ROWS, INEXACT = 10, 5
"""Rows of the table of the slowest layers and of the least exact ones; JSON has all."""


def to_text(found: Diagnosis) -> str:
    """The diagnosis as plain text."""
    return as_text(to_rich(found), WIDTH)


def to_rich(found: Diagnosis, *, everything: bool = False) -> Group:
    """The diagnosis for a terminal; `everything`: every layer, in the order of the graph."""
    parts: list[RenderableType] = [
        safe_text(f"verdict: {found.verdict}", style="bold"),
        safe_text(
            f"{found.model} on {found.environment.get('device', '?')}, inputs {', '.join(found.inputs)}"
        ),
        safe_text(f"this device: {found.ceilings}"),
    ]
    parts += [safe_text(f"a call in {lane}: {launches}") for lane, launches in found.launches.items()]
    parts += [safe_text(f"power in {lane}: {used}") for lane, used in found.usage.items()]
    if found.findings:
        parts += [safe_text("\nfindings", style="bold")]
    for number, finding in enumerate(found.findings, 1):
        parts.append(safe_text(f"{number}. [{finding.mark()}] {finding.name}: {finding.says}"))
        more = [f"at {place}" for place in finding.places]
        more += [f"executed: {finding.counterfactual}"] if finding.counterfactual else []
        more += [f"do: {finding.advice}"] if finding.advice else []
        parts += [Padding(safe_text(line), (0, 0, 0, 3)) for line in more]
    if found.layers:
        parts += [Text(), _layers(found, everything=everything)]
    if found.own:
        parts += [Text(), _own(found, everything=everything)]
    if found.training:
        parts += [Text(), _training(found)]
    for lane, errors in found.accuracy.items():
        if not errors:
            continue
        shown = errors if everything else errors[:INEXACT]
        rows = [
            (
                each.name,
                each.place,
                "overflow" if each.overflows else f"{each.alone:.1e}",
                f"{each.accumulated:.1e}",
                "–" if each.at_outputs is None else f"{each.at_outputs:.1e}",
            )
            for each in shown
        ]
        title = f"errors against float64, {lane}: the operators that matter most"
        parts += [Text(), _table(title, ("operator", "place", "alone", "so far", "at outputs"), rows)]
    if found.sweep:
        parts += [Text(), *_sweep(found)]
    parts += [
        safe_text(f"\nnote: {note}" if not place else f"note: {note}")
        for place, note in enumerate(found.notes)
    ]
    return Group(*parts, safe_text(f"took {found.seconds:.1f} s"))


def _layers(found: Diagnosis, *, everything: bool) -> Table:
    lanes = [lane for lane in found.latency if any(lane in layer.spent for layer in found.layers)]
    total = sum(layer.seconds("fp32") for layer in found.layers) or 1.0
    rows = sorted(found.layers, key=lambda layer: -layer.seconds("fp32"))[:ROWS]
    cells = [
        (
            layer.name,
            layer.work.place,
            *(f"{1e3 * layer.seconds(lane):.3f}" if lane in layer.spent else "–" for lane in lanes),
            f"{layer.seconds('fp32') / total:.0%}",
            f"{layer.work.madds / 1e6:.4g}",
            f"{layer.bounds.get('fp32', '–')} {layer.reached.get('fp32', 0.0):.0%}",
        )
        for layer in (found.layers if everything else rows)
    ]
    times = (lane if lane == OPTIMIZED else f"{lane} ms" for lane in lanes)
    columns = ("operator", "place", *times, "share", "MMAdds", "bound by")
    count = "" if everything else f" ({len(cells)} slowest of {len(found.layers)})"
    return _table(f"layers{count}; bound by: share of that ceiling reached", columns, cells)


def _own(found: Diagnosis, *, everything: bool) -> Table:
    slowest = found.own if everything else sorted(found.own, key=lambda kernel: -kernel.seconds)[:ROWS]
    rows = [(kernel.name[:NAME], kernel.place, f"{1e3 * kernel.seconds:.4f}") for kernel in slowest]
    what = "every one" if everything else f"{len(rows)} slowest of {len(found.own)}"
    title = f"kernels of the optimized program ({what})"
    return _table(title, ("operator", "place", "ms"), rows)


def _training(found: Diagnosis) -> Table:
    has_peaks = any(times.peak is not None for times in found.training.values())
    has_losses = any(times.loss for times in found.training.values())
    rows = [
        (
            way,
            *([times.loss] if has_losses else []),
            milliseconds(times.step.median),
            *(milliseconds(times.parts[part]) if times.parts else "–" for part in PARTS),
            *(["–" if times.peak is None else f"{times.peak / 2**20:.0f}"] if has_peaks else []),
        )
        for way, times in found.training.items()
    ]
    losses, peaks = ["loss"] if has_losses else [], ["MiB"] if has_peaks else []
    columns = ("way", *losses, "step", *PARTS, *peaks)
    title = "a training step, ms, and its peak of memory" if has_peaks else "a training step, ms"
    return _table(title, columns, rows)


def _sweep(found: Diagnosis) -> list[RenderableType]:
    lanes = list(found.sweep[0].latency)
    rows = [
        (
            str(row.batch),
            *(f"{1e3 * row.latency[lane].median:.3f}" for lane in lanes),
            *(f"{row.throughput(lane):.1f}" for lane in lanes),
        )
        for row in found.sweep
    ]
    columns = ("batch", *(f"{lane} ms" for lane in lanes), *(f"{lane} per s" for lane in lanes))
    return [_table("batch sweep", columns, rows), *map(safe_text, crossings_told(found.sweep))]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, title=title, title_justify="left", header_style="bold", pad_edge=False)
    for column in columns:
        is_text = column in ("operator", "place", "bound by", "way", "loss")
        table.add_column(column, overflow="fold", justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*map(safe_text, row))
    return table
