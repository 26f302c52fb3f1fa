"""A contestant of the race that runs in an environment of its own, without PyTorch.

    python -m benchmarks.engine_process ENGINE FOLDER THREADS

Reads FOLDER/model.onnx (or model.pt, which the converter of LiteRT reads in a process of its own) and
inputs.npz, writes FOLDER/<engine>.npz with its outputs. See `benchmarks.race_protocol`.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ampopt.system.meters import cpu_meter
from benchmarks.engine_venvs import python_of
from benchmarks.engines_on_cpu import ENGINES, convert
from benchmarks.race_protocol import Facts, peak_bytes, resident_bytes, serve_pipe
from benchmarks.regimes import Block, Subject, block

Array = npt.NDArray[Any]

SETTLE_S = 1.0

CONVERTS_S = 300.0


def command(engine: str, folder: Path, threads: int) -> list[str]:
    """What starts this file for an engine. Raises RuntimeError where its environment was not made."""
    module = [str(python_of(engine)), "-m", "benchmarks.engine_process"]
    return [*module, engine, str(folder), str(threads)]


def converted(python: str, engine: str, folder: Path, threads: int) -> None:
    """Convert a network in a process of an interpreter. Raises RuntimeError where the engine does not."""
    module = [python, "-m", "benchmarks.engine_process"]
    convert_it = [*module, engine, str(folder), str(threads), "--convert"]
    done = subprocess.run(convert_it, capture_output=True, text=True, timeout=CONVERTS_S)
    if done.returncode:
        raise RuntimeError(f"not converted: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


class Loaded:
    """A network that runs in this process without PyTorch's own tensors; who makes it sets `call`."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self.name, self.folder, self.threads = name, folder, threads
        self.call: Callable[[], list[Array]] = list

    def inputs(self) -> tuple[Array, ...]:
        """The network's inputs."""
        with np.load(self.folder / "inputs.npz") as stored:
            return tuple(stored.values())

    def choose(self) -> Facts:
        """Write the outputs for whoever knows what they should be."""
        np.savez(self.folder / f"{self.name}.npz", *self.call())
        return {"way": f"{self.threads} threads"}

    def settle(self) -> Facts:
        """Warm up."""
        end = time.perf_counter() + SETTLE_S
        while time.perf_counter() < end:
            self.call()
        return {}

    def block(self, regime: str) -> Block:
        """Time a block."""
        return block(Subject(self.call, meter=cpu_meter()), regime)


class InEngine(Loaded):
    """An engine with one network."""

    def make(self) -> Facts:
        """Convert the network in a process of its own, then load it."""
        start = time.perf_counter()
        converted(sys.executable, self.name, self.folder, self.threads)
        inputs = self.inputs()
        before, resident = peak_bytes(), resident_bytes()
        run = ENGINES[self.name](self.folder, inputs, self.threads)
        self.call = functools.partial(run, *inputs)
        self.call()
        taken = {"bytes": peak_bytes() - before, "kept_bytes": resident_bytes() - resident}
        return {"prepare_s": time.perf_counter() - start, **taken}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("threads", type=int)
    parser.add_argument("--convert", action="store_true")
    options = parser.parse_args()
    if options.convert:
        convert(options.engine, options.folder)
    else:
        serve_pipe(lambda: InEngine(options.engine, options.folder, options.threads))


if __name__ == "__main__":
    main()
