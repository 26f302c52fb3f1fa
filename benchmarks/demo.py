"""ampopt at work: a robot's vision network and a trained digits classifier, each pass before and after.

python -m benchmarks.demo
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from ampopt import AmpoptError, optimize
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
    fast = optimize(model, (photos[:1],), budget_s=75, cache=False)
    console.print(to_rich(fast.report))
    REPORT.parent.mkdir(exist_ok=True)
    with replacing(REPORT) as file:
        file.write_text(render(fast.report.document(), REPORT), encoding="utf-8")
    console.print(f"as a page to look at: {REPORT}")
    with torch.no_grad():
        error = relative_error(fast(photos[1:]), model(photos[1:]))
    console.print(f"on the other photograph it differs from the original by {error:.1e} (relative)")


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
