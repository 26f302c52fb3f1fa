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

from benchmarks.engine_venvs import python_of
from benchmarks.engines_on_cpu import ENGINES, convert
from benchmarks.meters import cpu_meter
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


class InEngine:
    """An engine with one network."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        self._engine, self._folder, self._threads = engine, folder, threads
        self._call: Callable[[], list[Array]] | None = None

    def make(self) -> Facts:
        """Convert the network in a process of its own, then load it."""
        start = time.perf_counter()
        converted(sys.executable, self._engine, self._folder, self._threads)
        with np.load(self._folder / "inputs.npz") as stored:
            inputs = tuple(stored.values())
        before, resident = peak_bytes(), resident_bytes()
        run = ENGINES[self._engine](self._folder, inputs, self._threads)
        self._call = functools.partial(run, *inputs)
        self._call()
        taken = {"bytes": peak_bytes() - before, "kept_bytes": resident_bytes() - resident}
        return {"prepare_s": time.perf_counter() - start, **taken}

    def choose(self) -> Facts:
        """Write the outputs for whoever knows what they should be."""
        assert self._call is not None
        np.savez(self._folder / f"{self._engine}.npz", *self._call())
        return {"way": f"{self._threads} threads"}

    def settle(self) -> Facts:
        """Warm up."""
        assert self._call is not None
        end = time.perf_counter() + SETTLE_S
        while time.perf_counter() < end:
            self._call()
        return {}

    def block(self, regime: str) -> Block:
        """Time a block."""
        assert self._call is not None
        return block(Subject(self._call, meter=cpu_meter()), regime)


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
