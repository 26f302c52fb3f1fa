"""ampopt at work: why a robot's network is slow, and each pass on it and on a trained digits classifier.

python -m benchmarks.demo
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from ampopt import AmpoptError, diagnose, optimize
from ampopt.document.model import Document, Points, Section
from ampopt.document.render import render
from ampopt.ir.numerics import relative_error
from ampopt.measure.terminal import to_rich
from ampopt.system.atomic import replacing
from benchmarks.models import WORKLOADS
from benchmarks.real_data import optimize_digits, photographs

TOLERATED_POINTS = 0.2
"""How far the accuracy may move, in percentage points."""

REPORT = Path("out/demo.html")
"""The report of the first part, as a page to look at."""

DIAGNOSIS_S, SEARCH_S = 15.0, 60.0
"""Seconds for the first network's diagnosis and for its search, which mostly ends earlier."""


def main() -> int:
    """Run both parts; 0 where everything was verified."""
    started = time.perf_counter()
    console = Console(width=max(Console().width, 150))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        _encdec(console, device)
        moved = _digits(console, device)
    except AmpoptError as error:
        console.print(f"[red]the demo failed:[/] {error}")
        return 1
    console.print(f"\nThe demo took {time.perf_counter() - started:.0f} s.")
    return 0 if moved <= TOLERATED_POINTS else 1


def _encdec(console: Console, device: torch.device) -> None:
    console.rule("EncDecMil18: 20 thousand parameters in 74 convolutions, on a photograph of 480 x 640")
    model = WORKLOADS["encdecmil18"].model().to(device)
    photos = photographs(480, 640).to(device)
    why = diagnose(model, (photos[:1],), budget_s=DIAGNOSIS_S)
    console.print(f"why it is slow: {why.verdict}\n", style="bold")
    fast = optimize(model, (photos[:1],), budget_s=SEARCH_S, cache=False)
    console.print(to_rich(fast.report))
    REPORT.parent.mkdir(exist_ok=True)
    page = with_reasons(fast.report.document(), why.document())
    with replacing(REPORT) as file:
        file.write_text(render(page, REPORT), encoding="utf-8")
    console.print(f"as a page to look at: {REPORT}")
    with torch.no_grad():
        error = relative_error(fast(photos[1:]), model(photos[1:]))
    console.print(f"on the other photograph it differs from the original by {error:.1e} (relative)")


def with_reasons(report: Document, why: Document) -> Document:
    """A report of `optimize` with what `diagnose` says of the same model, its findings before the passes."""
    findings = [section for section in why.sections if section.heading[:1].isdigit()]
    tables = [s for s in why.sections if s not in findings and s.heading not in ("Notes", "Environment")]
    notes = [dataclasses.replace(s, heading="Notes on this") for s in why.sections if s.heading == "Notes"]
    return dataclasses.replace(
        report,
        sections=(
            Section("Why the original is slow", (Points((why.verdict,)),)),
            *findings,
            *(dataclasses.replace(section, is_folded=True) for section in (*tables, *notes)),
            *report.sections,
        ),
        data={"optimize": report.data, "diagnose": why.data},
    )


def _digits(console: Console, device: torch.device) -> float:
    console.rule("A digits classifier: trained here, optimized in both lanes, tested on 500 images")
    result = optimize_digits(device)
    for lane, module in result.modules.items():
        console.print(to_rich(module.report))
        console.print(
            f"test accuracy: {result.original:.1f} % before, {result.lanes[lane]:.1f} % after ({lane})\n"
        )
    return max(abs(after - result.original) for after in result.lanes.values())


if __name__ == "__main__":
    sys.exit(main())
