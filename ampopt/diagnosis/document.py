"""A diagnosis as a document: verdict, findings, layers against the ceilings, errors, the batch sweep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampopt.diagnosis.finding import milliseconds
from ampopt.diagnosis.layers import LITTLE
from ampopt.diagnosis.sweep import crossings_told
from ampopt.diagnosis.training_step import PARTS
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
    Points,
    Section,
    Table,
    Tone,
)

if TYPE_CHECKING:
    from ampopt.diagnosis.finding import Finding
    from ampopt.diagnosis.layers import Layer
    from ampopt.diagnosis.result import Diagnosis

SLOWEST = 15
"""Operators in the plot of the slowest ones."""

BOUND_TONES: dict[str, Tone] = {"compute": "good", "memory": "warn", "launch": "bad"}


def to_document(found: Diagnosis) -> Document:
    """The document of a diagnosis."""
    device = found.environment.get("device", "?")
    facts = tuple((name, str(value)) for name, value in found.environment.items())
    return Document(
        title=f"diagnose: {found.model}",
        subtitle=f"on {device}, inputs {', '.join(found.inputs)}",
        verdict=found.verdict,
        tone="bad" if any(finding.is_fault for finding in found.findings) else "note",
        sections=(
            *_findings(found),
            *_training(found),
            *_layers(found),
            *_own(found),
            *_errors(found),
            *_sweep(found),
            Section("Notes", (Points(found.notes),) if found.notes else ()),
            Section("Environment", (Facts((("ceilings", str(found.ceilings)), *facts)),)),
        ),
        data=found.to_dict(),
        figures=tuple(_figures(found)),
    )


def _figures(found: Diagnosis) -> Iterator[Figure]:
    for lane, measured in found.latency.items():
        busy = found.device_time.get(lane)
        note = "" if busy is None else f"of which kernels {milliseconds(busy.median)} ms"
        if lane in found.launches:
            note = f"{found.launches[lane]}; {note}"
        if lane in found.usage:
            note = f"{note}; {found.usage[lane]}" if note else str(found.usage[lane])
        yield Figure(
            f"{lane}, {'a step' if found.training else 'a call'}", f"{milliseconds(measured.median)} ms", note
        )


def _findings(found: Diagnosis) -> Iterator[Section]:
    for number, finding in enumerate(found.findings, 1):
        whole = f" of a {'step' if found.training else 'call'}"
        heading = f"{number}. {finding.name} ({finding.mark(whole)})"
        yield Section(heading, (Points(tuple(_told(finding))),))


def _told(finding: Finding) -> Iterator[str]:
    yield finding.says
    yield from (f"at {place}" for place in finding.places)
    if finding.counterfactual is not None:
        yield f"executed: {finding.counterfactual}"
    if finding.advice:
        yield f"do: {finding.advice}"


def _training(found: Diagnosis) -> Iterator[Section]:
    if not found.training:
        return
    bars = tuple(
        Bar(f"{way} ({times.loss})" if times.loss else way, 1e3 * times.step.median)
        for way, times in found.training.items()
    )
    has_losses = any(times.loss for times in found.training.values())
    columns = (
        Column("way"),
        *([Column("loss")] if has_losses else []),
        *(Column(f"{name} ms", is_number=True) for name in ("step", *PARTS)),
        Column("peak MiB", is_number=True),
    )
    rows = tuple(
        (
            Cell(way),
            *([Cell(times.loss)] if has_losses else []),
            _milliseconds(times.step.median),
            *(_milliseconds(times.parts.get(part)) for part in PARTS),
            Cell("–") if times.peak is None else Cell(f"{times.peak / 2**20:.1f}", times.peak),
        )
        for way, times in found.training.items()
    )
    yield Section("Ways to train", (Bars("a training step", "ms", bars), Table(columns, rows)))


def _milliseconds(seconds: float | None) -> Cell:
    return Cell("–", 0.0) if seconds is None else Cell(milliseconds(seconds), 1e3 * seconds)


def _layers(found: Diagnosis) -> Iterator[Section]:
    if not found.layers:
        return
    lanes = [lane for lane in found.latency if any(lane in layer.spent for layer in found.layers)]
    slowest = sorted(found.layers, key=lambda layer: -layer.seconds(lanes[0]))[:SLOWEST]
    bars = tuple(
        Bar(layer.name, 1e3 * layer.seconds(lanes[0]), tone=_tone(layer, lanes[0]))
        for layer in slowest
        if lanes[0] in layer.spent
    )
    plot = Bars(f"the slowest operators, {lanes[0]}", "ms", bars)
    columns = (
        *(Column("operator"), Column("place"), Column("output shape")),
        *(Column(f"{lane} ms", is_number=True) for lane in lanes),
        *(Column(name, is_number=True) for name in ("parameters", "MMAdds", "MB", "GB/s", "TFLOP/s")),
        *(Column("bound by"), Column("of the ceiling", is_number=True)),
    )
    rows = tuple(_row(layer, lanes) for layer in found.layers)
    colours = Points(
        (
            "green is bound by compute, amber by memory, red by the launch of operators; the others reach "
            f"less than {LITTLE:.0%} of each: none of the three explains their time",
        )
    )
    yield Section("Layers", (plot, colours, Table(columns, rows, is_filtered=True)))


def _row(layer: Layer, lanes: list[str]) -> tuple[Cell, ...]:
    first, work = lanes[0], layer.work
    seconds = layer.seconds(first)
    bound, moved = layer.bounds.get(first, "–"), layer.moved.get(first, work.moved)
    return (
        *(Cell(layer.name), Cell(work.place), Cell("x".join(map(str, work.shape)))),
        *(_time(layer, lane) for lane in lanes),
        Cell(str(work.parameters), work.parameters),
        Cell(f"{work.madds / 1e6:.4g}", work.madds),
        Cell(f"{moved / 1e6:.4g}", moved),
        _rate(moved / 1e9, seconds),
        _rate(work.flops / 1e12, seconds),
        Cell(bound, tone=_tone(layer, first)),
        Cell(f"{layer.reached.get(first, 0.0):.0%}", layer.reached.get(first, 0.0)),
    )


def _tone(layer: Layer, lane: str) -> Tone:
    cause = layer.cause(lane)
    return "plain" if cause is None else BOUND_TONES[cause]


def _time(layer: Layer, lane: str) -> Cell:
    seconds = layer.seconds(lane)
    return Cell(f"{1e3 * seconds:.4f}", 1e3 * seconds) if lane in layer.spent else Cell("–", 0.0)


def _rate(amount: float, seconds: float) -> Cell:
    return Cell(f"{amount / seconds:.3g}", amount / seconds) if seconds else Cell("–", 0.0)


def _own(found: Diagnosis) -> Iterator[Section]:
    columns = (
        *(Column("kernel"), Column("ms", is_number=True)),
        *(Column("places"), Column("nodes"), Column("attributed by")),
    )
    rows = tuple(
        (
            Cell(kernel.name),
            Cell(f"{1e3 * kernel.seconds:.4f}", 1e3 * kernel.seconds),
            Cell("; ".join(text for text in map(str, kernel.origins) if text) or kernel.place),
            *(Cell(", ".join(kernel.nodes)), Cell(kernel.by)),
        )
        for kernel in found.own
    )
    heading = f"Kernels of the optimized program ({len(rows)})"
    yield Section(heading, (Table(columns, rows, is_filtered=True),) if rows else (), is_folded=True)


def _errors(found: Diagnosis) -> Iterator[Section]:
    columns = (
        *(Column("operator"), Column("place")),
        *(Column(name, is_number=True) for name in ("alone", "so far", "at outputs", "largest value")),
    )
    for lane, errors in found.accuracy.items():
        rows = tuple(
            (
                *(Cell(each.name), Cell(each.place)),
                Cell("overflow", tone="bad") if each.overflows else Cell(f"{each.alone:.1e}", each.alone),
                Cell(f"{each.accumulated:.1e}", each.accumulated),
                Cell("–" if each.at_outputs is None else f"{each.at_outputs:.1e}", each.at_outputs),
                Cell(f"{each.largest:.3g}", each.largest),
            )
            for each in errors
        )
        heading = f"Errors against float64, {lane}: the operators that matter most first"
        yield Section(heading, (Table(columns, rows, is_filtered=True),) if rows else (), is_folded=True)


def _sweep(found: Diagnosis) -> Iterator[Section]:
    if not found.sweep:
        return
    lanes = list(found.sweep[0].latency)
    batches = tuple(float(row.batch) for row in found.sweep)
    lines = tuple(Line(lane, batches, tuple(row.throughput(lane) for row in found.sweep)) for lane in lanes)
    columns = (
        Column("batch", is_number=True),
        *(Column(f"{lane} ms", is_number=True) for lane in lanes),
        *(Column(f"{lane} per s", is_number=True) for lane in lanes),
        *(Column(f"{lane} gaps", is_number=True) for lane in found.sweep[0].kernels_s),
    )
    rows = tuple(
        (
            Cell(str(row.batch), row.batch),
            *(Cell(f"{1e3 * row.latency[lane].median:.3f}") for lane in lanes),
            *(Cell(f"{row.throughput(lane):.1f}") for lane in lanes),
            *(Cell(f"{row.gaps(lane) or 0.0:.0%}") for lane in row.kernels_s),
        )
        for row in found.sweep
    )
    told = tuple(crossings_told(found.sweep))
    plot = Lines("throughput by batch", "batch", "examples a second", lines, is_log=True)
    yield Section("Batch sweep", (Points(told), plot, Table(columns, rows)))
