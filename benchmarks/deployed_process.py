"""One way to run a saved network, in a process of its own, see `benchmarks.deployed`.

    python -m benchmarks.deployed_process WAY FOLDER THREADS

With WAY "save" it makes the network's bundle instead, by the default call.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.deployed_ways import BUNDLE, WAYS
from benchmarks.engines_on_cpu import Array
from benchmarks.meters import cpu_meter
from benchmarks.race_protocol import Facts, anonymous_bytes, peak_bytes, resident_bytes, serve_pipe
from benchmarks.regimes import Block, Subject, block

SAVE = "save"

SETTLE_S = 1.0


class Deployed:
    """A way that has loaded its network."""

    def __init__(self, way: str, folder: Path, threads: int) -> None:
        self._way, self._folder, self._threads = way, folder, threads
        self._call: Callable[[], list[Array]] | None = None

    def make(self) -> Facts:
        """Load the network and run it once; what both took, with all that had to be imported."""
        with np.load(self._folder / "inputs.npz") as stored:
            inputs = tuple(stored.values())
        resident, start = resident_bytes(), time.perf_counter()
        self._call = functools.partial(WAYS[self._way](self._folder, inputs, self._threads), *inputs)
        self._call()
        return {"first_answer_s": time.perf_counter() - start, "bare_bytes": resident}

    def choose(self) -> Facts:
        """Write the outputs for whoever knows what they should be."""
        assert self._call is not None
        np.savez(self._folder / f"{self._way}.npz", *self._call())
        return {}

    def settle(self) -> Facts:
        """Warm up; the memory of the process then, and the most that it has had."""
        assert self._call is not None
        end = time.perf_counter() + SETTLE_S
        while time.perf_counter() < end:
            self._call()
        own = {"resident_bytes": resident_bytes(), "anonymous_bytes": anonymous_bytes()}
        return {**own, "peak_bytes": peak_bytes()}

    def block(self, regime: str) -> Block:
        """Time a block."""
        assert self._call is not None
        return block(Subject(self._call, meter=cpu_meter()), regime)


def save(folder: Path) -> Facts:
    """`ampopt.optimize(model, *inputs).save(path)`, with nothing else."""
    torch = importlib.import_module("torch")
    model = torch.load(folder / "model.pt", weights_only=False)  # of our own making
    inputs = torch.load(folder / "inputs.pt")
    start = time.perf_counter()
    fast = importlib.import_module("ampopt").optimize(model, inputs)
    prepared = time.perf_counter()
    fast.save(folder / BUNDLE)
    took = {"prepare_s": prepared - start, "save_s": time.perf_counter() - prepared}
    return {**took, "chosen": fast.report.chosen, "passes": [step.name for step in fast.program.recipe]}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("way", choices=[SAVE, *WAYS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    if options.way == SAVE:
        (options.folder / "saved.json").write_text(json.dumps(save(options.folder)), encoding="utf-8")
    else:
        serve_pipe(lambda: Deployed(options.way, options.folder, options.threads))


if __name__ == "__main__":
    main()
