"""Both ends of the pipe between a race and a contestant's process: requests and answers as JSON lines.

Requests come to the process on its standard input; answers go to its standard output, and whatever libraries
print there goes to the standard error. This file needs no PyTorch: engines in other environments use it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.regimes import Block

CACHES = (
    *("AMPOPT_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("CUDA_CACHE_PATH", "PYTORCH_KERNEL_CACHE_PATH"),
)
"""Variables that name the folders in which ampopt, compilers and the driver keep code."""

COMPILERS = min(8, os.cpu_count() or 1)
"""Processes in which inductor compiles; by default it begins one for every core, contestant by contestant."""

Facts = dict[str, Any]


class Runner(Protocol):
    """What a contestant's process can be asked for, in this order."""

    def make(self) -> Facts:
        """Make every way to run; facts about it. Others may be making theirs."""

    def choose(self) -> Facts:
        """Time the ways, alone, and keep the fastest; facts about it."""

    def settle(self) -> Facts:
        """Warm up; more facts."""

    def block(self, regime: str) -> Block:
        """Time a block in a regime."""


def emptied(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """An environment in which every cache is an empty folder below this one."""
    found = dict(given)
    for name in CACHES:
        place = folder / name.lower()
        place.mkdir(parents=True)
        found[name] = str(place)
    return found


_numbers = itertools.count()


def racing_environment(name: str, folder: Path, threads: int | None = None) -> dict[str, str]:
    """The environment of a contestant's processes: empty caches below `folder`, and as many threads."""
    plain = "".join(c if c.isalnum() else "_" for c in name)  # compilers trip over blanks
    env = emptied(folder / f"{plain}-{next(_numbers)}", os.environ)
    env["TORCHINDUCTOR_COMPILE_THREADS"] = str(COMPILERS)
    if threads is not None:
        env |= {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS")}
    return env


class Racer:
    """A contestant's process. Any method raises RuntimeError where that process ended."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the command in an environment."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(list(command), stdin=pipe, stdout=pipe, text=True, env=env)

    def ask(self, what: str, *arguments: str) -> Any:
        """Ask for a method of `Runner`; what it returns. Raises RuntimeError with what failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps([what, *arguments]), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise RuntimeError(f"its process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["done"]

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def serve(runner: Runner, requests: Callable[[], str], answer: Callable[[str], object]) -> None:
    """Answer requests until there are no more; a failure is an answer, too."""
    while line := requests():
        what, *arguments = json.loads(line)
        try:
            found = {"done": getattr(runner, what)(*arguments)}
        except Exception as failure:
            found = {"failed": (str(failure).strip() or type(failure).__name__).splitlines()[0]}
        answer(json.dumps(found))


def serve_pipe(make_runner: Callable[[], Runner]) -> None:
    """Answer on the standard output, which libraries cannot reach from here on."""
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)
        serve(make_runner(), sys.stdin.readline, lambda text: print(text, file=pipe, flush=True))


def peak_bytes() -> int:
    """The most memory that this process has had on the host."""
    return memory_bytes()["peak_bytes"]


def resident_bytes() -> int:
    """The memory that this process has on the host now."""
    return memory_bytes()["resident_bytes"]


_MEMORY = {"VmHWM": "peak_bytes", "VmRSS": "resident_bytes", "RssAnon": "anonymous_bytes"}


def memory_bytes() -> dict[str, int]:
    """The memory of this process on the host at one moment: the most so far, all, and what no file holds.

    Of the last, libraries that are mapped are no part: they can be shared, and dropped. The most is not
    `getrusage`'s, which a process inherits from the one that started it.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return {key: int(told[name].split()[0]) * 1024 for name, key in _MEMORY.items()}
