"""`python -m examples.ball_detector.robot_side`: run bundles where torch cannot be imported.

It takes test images with the original's heat maps, and bundles, and says how far the peaks moved. Neither
this file nor what it imports needs torch, and every import of torch is refused while it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.abc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ampopt import robot
from ampopt.errors import AmpoptError
from examples.ball_detector.comparison import Array, Comparison, call_in_turn, compare, table

CPU = "CPUExecutionProvider"


class NoTorch(importlib.abc.MetaPathFinder):
    """Finds no torch, as on a machine where it is not installed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for torch and its submodules; leave the others to the next finder."""
        if fullname.partition(".")[0] == "torch":
            raise ModuleNotFoundError("there is no torch on this robot", name=fullname)


def refuse_torch() -> None:
    """Let every later import of torch fail. Raises RuntimeError where it was imported already."""
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported already: this process is not a robot without it")
    sys.meta_path.insert(0, NoTorch())


def run_bundle(path: Path, images: Array, reference: Array) -> Comparison:
    """Load a bundle, run it on images [N, 3, H, W], one a call, and compare with the original's heat maps."""
    detector = robot.load(path)
    for note in detector.notes:
        print(f"   {path.name}: {note}")
    precision = detector.manifest["onnx"]["precision"].upper()
    provider = detector.options.provider
    print(f"   {path.name}: loaded; self-test error {detector.error:.1e}; {provider}")

    def detect(image: Array) -> Array:
        heat_map = detector(image)
        if isinstance(heat_map, dict):
            raise AmpoptError(f"{path} has outputs {', '.join(heat_map)}: a detector has one")
        return heat_map

    [(heat_maps, milliseconds)] = call_in_turn([detect], images)
    mark = " (*)" if precision == "FP16" and provider == CPU else ""
    name = f"{precision} bundle without torch, {provider.removesuffix('ExecutionProvider')}{mark}"
    return compare(name, heat_maps, reference, milliseconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0: the peaks of every bundle stayed where they were, 1: they did not, 2: one was refused."""
    parser = argparse.ArgumentParser(prog="python -m examples.ball_detector.robot_side", description=__doc__)
    parser.add_argument("frames", type=Path, help=".npz with `images` and the original's `heat_maps`")
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write the comparisons here, and no table")
    given = parser.parse_args(arguments)
    refuse_torch()
    with np.load(given.frames) as frames:
        images, reference = frames["images"], frames["heat_maps"]
    try:
        rows = [run_bundle(path, images, reference) for path in given.bundles]
    except AmpoptError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    if given.json is None:
        print(table(rows))
    else:
        given.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
