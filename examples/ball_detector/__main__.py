"""`python -m examples.ball_detector`: train a detector, make it fast, prove it where there is no torch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from examples.ball_detector.comparison import ENOUGH, NEAR, Array, Comparison, call_in_turn, compare, table
from examples.ball_detector.gpu_rounding import heat_maps_in_half
from examples.ball_detector.making import optimized, save_bundles, trained
from examples.ball_detector.rendering import test_images
from examples.ball_detector.training import STEPS, accuracy

ROOT = Path(__file__).resolve().parents[2]
TEST_SEED = 1

ON_CPU = (
    "(*) ONNX Runtime's CPU provider computes in float32 between casts: this row proves the file. The\n"
    "    emulated row, which rounds every float16 result as a GPU does, proves the precision."
)


@dataclasses.dataclass(frozen=True)
class Effort:
    """Training steps, test images, seconds for `optimize`, and for each sweep of the session's options."""

    steps: int
    images: int
    budget_s: float
    tune_s: float


FULL, QUICK = Effort(STEPS, 300, 40.0, 5.0), Effort(50, 40, 5.0, 0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the peaks of both bundles, and of FP16 as a GPU rounds it, stayed where they were."""
    parser = argparse.ArgumentParser(prog="python -m examples.ball_detector", description=__doc__)
    parser.add_argument("--weights", type=Path, help="take these weights (.safetensors) and do not train")
    parser.add_argument("--images", type=int, help=f"test images (default: {FULL.images})")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/ball_detector"), help="a folder")
    parser.add_argument("--quick", action="store_true", help="too little of everything, to see it run")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    effort = QUICK if given.quick else FULL
    folder: Path = given.output
    folder.mkdir(parents=True, exist_ok=True)

    model = trained(given.weights, effort.steps, folder)
    rendered, centres = test_images(given.images or effort.images, TEST_SEED)
    right = accuracy(model, rendered, centres)
    print(
        f"   {len(rendered)} test images, over backgrounds that training never showed: {right.found:.1%} "
        f"found, median distance {right.median:.2f} px, {right.within_3_px:.1%} within 3 px"
    )
    fast = optimized(model, effort.budget_s)
    images = rendered.numpy()
    original, quick = call_in_turn([_in_torch(model), _in_torch(fast)], images)
    reference = original[0]
    rows = [
        compare("original, fp32 in PyTorch", original[0], reference, original[1]),
        compare(f"optimized, {fast.report.chosen} in PyTorch", quick[0], reference, quick[1]),
    ]

    bundles = save_bundles(fast, folder, effort.tune_s)
    frames = folder / "frames.npz"
    np.savez(frames, images=images, heat_maps=reference)
    robots = on_the_robot(frames, bundles)

    print("5. FP16 as a GPU rounds it, emulated on this CPU", flush=True)
    heat_maps = heat_maps_in_half(model, fast, images)
    half = compare("FP16 as a GPU rounds it, emulated", heat_maps, reference, None)
    code = conclude([*rows, *robots, half], judged=[*robots, half])
    print(f"took {time.perf_counter() - started:.0f} s")
    return code


def _in_torch(model: nn.Module) -> Callable[[Array], Array]:
    """The model as a function of arrays."""

    def call(image: Array) -> Array:
        with torch.no_grad():
            heat_map: Array = model(torch.from_numpy(image)).numpy()
        return heat_map

    return call


def on_the_robot(frames: Path, bundles: Sequence[Path]) -> list[Comparison]:
    """Run the bundles in a process of their own that refuses to import torch."""
    print("4. On the robot: another process, in which every import of torch fails", flush=True)
    rows = frames.with_name("robot.json").resolve()
    rows.unlink(missing_ok=True)
    paths = [str(path.resolve()) for path in (frames, *bundles)]
    module = "examples.ball_detector.robot_side"
    done = subprocess.run([sys.executable, "-m", module, *paths, "--json", str(rows)], cwd=ROOT)
    if not rows.exists():
        raise SystemExit(f"the robot's process ended with {done.returncode}; what it said is above")
    return [Comparison(**row) for row in json.loads(rows.read_text())]


def conclude(rows: Sequence[Comparison], judged: Sequence[Comparison]) -> int:
    """Print the table and the verdict; returns the exit code."""
    print(f"\n{table(rows)}")
    if any("(*)" in row.name for row in rows):
        print(ON_CPU)
    failed = [row.name for row in judged if not row.passed]
    if failed:
        print(
            f"FAILED: more than {1 - ENOUGH:.0%} of the peaks moved by over {NEAR:g} px: {'; '.join(failed)}"
        )
        return 1
    print(f"PASSED: at least {ENOUGH:.0%} of the peaks moved by at most {NEAR:g} px, in FP32 and in FP16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
