"""One contestant of the race in a process of its own: prepared once, then sampled whenever it is asked.

Requests come as JSON lines on the standard input, answers go as JSON lines to the standard output; whatever
libraries print there goes to the standard error. `Racer` is the other end.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import first_line
from ampopt.ir.numerics import relative_error
from ampopt.ir.signature import flatten_outputs
from ampopt.measure.clocks import latency, synchronize
from ampopt.system.flags import cuda_math
from benchmarks.contestants import contestants
from benchmarks.host_time import beyond_replay
from benchmarks.race_networks import racer

SETTLED = 0.02
"""A warm-up ends when the median of its latest calls is this close to that of the calls before them."""

WINDOW, WARM_UP_S = 8, 3.0

COMPILERS = min(8, os.cpu_count() or 1)
"""Processes in which inductor compiles; by default it begins one for every core, contestant by contestant."""

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "AMPOPT_CACHE")

LONG_CALL_S = 0.5
"""A shorter call is timed after an untimed one: threads have rested since the contestant's last turn."""


class Racer:
    """A contestant in its process, with compilers' caches of its own that are empty at first.

    Any method raises RuntimeError where that process ended.
    """

    def __init__(self, contestant: str, device: torch.device, folder: Path) -> None:
        """`folder` is where `write_parts` writes; that may come later."""
        command = [sys.executable, "-m", "benchmarks.race_process", contestant, str(device)]
        pipe = subprocess.PIPE
        plain = "".join(c if c.isalnum() else "_" for c in contestant)  # compilers trip over blanks
        caches = {name: str(folder / plain / name.lower()) for name in CACHES}
        self._process = subprocess.Popen(
            [*command, str(folder)],
            stdin=pipe,
            stdout=pipe,
            text=True,
            env={**os.environ, **caches, "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILERS)},
        )

    def ask(self, request: str) -> Any:
        """`prepare` and `settle`: a dict of facts; `sample`: the seconds of a call. Raises what failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
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


def prepare(name: str, device: torch.device, folder: Path) -> tuple[functools.partial[object], Any]:
    """Make a contestant: it with its inputs bound, and what there is to say of it."""
    contestant = next(each for each in contestants(device) if each.name == name)
    model = torch.load(folder / "model.pt", map_location=device, weights_only=False)  # of our own making
    inputs, reference = (torch.load(folder / f"{part}.pt") for part in ("inputs", "reference"))
    inputs = tuple(tensor.to(device) for tensor in inputs)
    before = peak_bytes()
    start = time.perf_counter()
    made = contestant.make(model, inputs)
    call = functools.partial(made, *inputs)
    outputs = flatten_outputs(call())[0]
    synchronize(device)
    seconds = time.perf_counter() - start
    pairs = zip(outputs, reference, strict=True)
    error = max(relative_error(output.cpu(), expected) for output, expected in pairs)
    facts = {"prepare_s": seconds, "relative_error": error, "passes": _passes(made)}
    return call, facts if device.type == "cuda" else {**facts, "bytes": peak_bytes() - before}


def write_parts(network: str, device: torch.device, folder: Path) -> None:
    """Write what every contestant reads: the network, its inputs, and its flat outputs in float64."""
    model, inputs = racer(network)
    torch.save(model, folder / "model.pt")
    torch.save(inputs, folder / "inputs.pt")
    with torch.no_grad():
        double = model.double().to(device)
        expected = flatten_outputs(double(*(tensor.double().to(device) for tensor in inputs)))[0]
    torch.save([tensor.cpu() for tensor in expected], folder / "reference.pt")


def peak_bytes() -> int:
    """The most memory that this process has had on the host."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def settle(call: functools.partial[object], device: torch.device) -> dict[str, float]:
    """Warm a contestant up; what a call of ampopt costs beyond the replay of its graph, if it has one."""
    warm_up(call, device)
    if device.type != "cuda" or not isinstance(call.func, OptimizedModule):
        return {}
    beyond = beyond_replay(call.func, call.args, device)
    return {} if beyond is None else {"beyond_replay_us": beyond}


def warm_up(call: Callable[[], object], device: torch.device) -> None:
    """Call until the latency has settled, see `SETTLED`, or `WARM_UP_S` have passed."""
    sample, end = latency(call, device), time.perf_counter() + WARM_UP_S
    taken: list[float] = []
    while time.perf_counter() < end:
        taken.append(sample())
        latest, earlier = sorted(taken[-WINDOW:]), sorted(taken[-2 * WINDOW : -WINDOW])
        if len(earlier) == WINDOW:
            middle = WINDOW // 2
            if abs(latest[middle] / earlier[middle] - 1) < SETTLED:
                return


def _passes(made: object) -> list[str] | None:
    """What ampopt kept, for its own rows; what it tried is printed."""
    if not isinstance(made, OptimizedModule):
        return None
    print(made.report, *made.program.recipe, sep="\n")
    return [step.name for step in made.program.recipe]


def serve(arguments: argparse.Namespace, answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests until the standard input ends; a failure is an answer, too."""
    device = torch.device(arguments.device)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if request == "prepare":
                call, facts = prepare(arguments.contestant, device, arguments.folder)
                sample = latency(call, device, long_s=LONG_CALL_S)
                answer({"done": facts})
            elif request == "settle":
                answer({"done": settle(call, device)})
            else:
                answer({"done": sample()})
        except Exception as failure:
            answer({"failed": first_line(failure)})


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("contestant")
    parser.add_argument("device")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)
        logging.basicConfig()
        logging.getLogger("ampopt").setLevel(logging.DEBUG)  # why a pass failed, in full
        strict = cuda_math(tf32=False, search=False) if "cuda" in arguments.device else None
        with torch.no_grad(), strict or contextlib.nullcontext():
            torch.empty(1, device=arguments.device)  # a GPU's libraries load while the reference is computed
            serve(arguments, lambda facts: print(json.dumps(facts), file=pipe, flush=True))


if __name__ == "__main__":
    main()
