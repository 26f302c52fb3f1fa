"""The report of `verify` as a document: the judgment, the latencies, and every frame in a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ampopt.document.model import Cell, Document, Facts, Figure, Line, Lines, Points, Section, Table
from ampopt.measure.field_test import QUANTILES, FieldReport, Finding, Judgment

STATISTICS = (*QUANTILES, "jitter_ms")


def to_document(
    found: FieldReport,
    judgment: Judgment,
    *,
    title: str,
    subtitle: str,
    notes: tuple[str, ...],
    facts: Mapping[str, str],
    data: Mapping[str, Any],
) -> Document:
    """A field test as a document; `facts` tells what was run and where, `data` is the report as JSON data."""
    verdict = "passed" if judgment.passed else f"FAILED: {'; '.join(judgment.reasons)}"
    if judgment.passed and judgment.warnings:
        verdict += f", though {'; '.join(judgment.warnings)}"
    return Document(
        title=title,
        subtitle=subtitle,
        verdict=verdict,
        tone="bad" if not judgment.passed else "warn" if judgment.warnings else "good",
        sections=(
            Section("Tests", (_findings(judgment),)),
            Section("Notes", (Points(notes),) if notes else ()),
            Section("Latencies", (_table(found), _frames(found))),
            Section("Run", (Facts(tuple(facts.items())),)),
        ),
        data=data,
        figures=tuple(_figures(found)),
    )


def _figures(found: FieldReport) -> Iterator[Figure]:
    late = found.missed + found.dropped
    limit = f"missed or dropped; {found.deadline_ms:g} ms at {found.hz:g} Hz"
    yield Figure("frames too late", f"{late} of {len(found.paced.samples) + found.dropped}", limit)
    for name, part in ((f"p50 at {found.hz:g} Hz", found.paced), ("p50 back to back", found.back_to_back)):
        yield Figure(name, f"{_ms(part.quantile(0.5))} ms", f"p99 {_ms(part.quantile(0.99))} ms")
    yield Figure("first frame", f"{found.first_ms:.1f} ms", "left out of all others")
    for name, size in (("memory", found.memory_bytes), ("GPU memory", found.gpu_memory_bytes)):
        if size is not None:
            yield Figure(name, f"{size / 1e6:.0f} MB", "peak")


def _findings(judgment: Judgment) -> Table:
    rows = [(_state(finding), finding.test, finding.text) for finding in judgment.findings]
    return Table.of(("result", "test", "what was found"), rows)


def _state(finding: Finding) -> Cell:
    if finding.passed:
        return Cell("passed", tone="good")
    return Cell("failed", tone="bad") if finding.decides else Cell("slower than promised", tone="warn")


def _table(found: FieldReport) -> Table:
    rows = []
    for name, part in ((f"at {found.hz:g} Hz", found.paced), ("back to back", found.back_to_back)):
        values = part.to_dict()
        rows.append((name, *(_ms(values[key]) for key in STATISTICS), str(values["frames"])))
    return Table.of(("frames", *(key.replace("_ms", " ms") for key in STATISTICS), "count"), rows)


def _frames(found: FieldReport) -> Lines:
    lines = [
        Line(name, tuple(map(float, range(len(part.samples)))), part.samples)
        for name, part in ((f"at {found.hz:g} Hz", found.paced), ("back to back", found.back_to_back))
    ]
    return Lines("Every frame; dashed: the deadline", "frame", "latency, ms", tuple(lines), found.deadline_ms)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
