"""What runs in a process of its own: a network's diagnosis, or one way to run the network, timed alone.

    python -m benchmarks.counterfactual_process NETWORK DEVICE CLOCK diagnose BUDGET_S
    python -m benchmarks.counterfactual_process NETWORK DEVICE CLOCK time SECONDS LANE REMEDY OF

Prints a line of JSON. The second one first gets ready, prints so, and times when a line comes. CLOCK "cpu" is
the time that the process computes, in place of the time that passes ("wall").
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.counterfactual_networks import network
from benchmarks.counterfactual_ways import Run, Way, prepared, wait

READY = "ready"

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""By name. Other load changes the time that passes more than the time that a thread computes."""

WARM_S, LEAST, MOST = 0.3, 8, 300
"""Seconds of calls that are not timed, and the fewest and most that are."""


def diagnosed(name: str, device: torch.device, clock: Callable[[], float], budget_s: float) -> dict[str, Any]:
    """What `ampopt.diagnose` says, with the samples of its counterfactuals in seconds."""
    import ampopt
    from ampopt.measure import sampling

    if clock is not time.perf_counter:
        setattr(sampling, "time", types.SimpleNamespace(perf_counter=clock, sleep=time.sleep))  # noqa: B010

    model, inputs = network(name, device)
    found = ampopt.diagnose(model, inputs, budget_s=budget_s, progress=False)
    told = found.to_dict()
    for finding, row in zip(found.findings, told["findings"], strict=True):
        if (ran := finding.counterfactual) is not None:
            row["samples"] = {"before": ran.before.samples, "after": ran.after.samples}
    kept = ("environment", "verdict", "notes", "seconds", "findings")
    return {key: told[key] for key in kept}


def sampled(run: Run, device: torch.device, clock: Callable[[], float], seconds: float) -> list[float]:
    """Seconds of calls one after another, each waited for."""
    once(run, device)
    end = time.perf_counter() + WARM_S
    while time.perf_counter() < end:
        once(run, device)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < LEAST or (len(found) < MOST and time.perf_counter() < end):
        found.append(once(run, device, clock))
    return found


def once(run: Run, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call."""
    if run.before is not None:
        run.before()
    wait(device)
    start = clock()
    run.call()
    wait(device)
    return clock() - start


def await_turn() -> None:
    """Say that everything is ready, and wait for a line."""
    print(READY, flush=True)
    sys.stdin.readline()


def main() -> None:
    """See the module."""
    name, device, clock, what = sys.argv[1], torch.device(sys.argv[2]), CLOCKS[sys.argv[3]], sys.argv[4]
    seconds = float(sys.argv[5])
    if what == "diagnose":
        print(json.dumps(diagnosed(name, device, clock, seconds)), flush=True)
        return
    with torch.no_grad():
        way, (model, inputs) = Way(*sys.argv[6:9]), network(name, device)
        if way.chooses:
            await_turn()
        run = prepared(way, model, inputs)
        once(run, device)
        if not way.chooses:
            await_turn()
        print(json.dumps(sampled(run, device, clock, seconds)), flush=True)


if __name__ == "__main__":
    main()
