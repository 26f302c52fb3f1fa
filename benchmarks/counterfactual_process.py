"""What runs in a process of its own: a network's diagnosis, or one way to run the network, timed alone.

    python -m benchmarks.counterfactual_process NETWORK DEVICE diagnose BUDGET_S
    python -m benchmarks.counterfactual_process NETWORK DEVICE time SECONDS LANE REMEDY OF

Prints a line of JSON. The second one first gets ready, prints so, and times when a line comes.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from benchmarks.counterfactual_networks import network
from benchmarks.counterfactual_ways import Run, Way, prepared, wait

READY = "ready"

WARM_S, LEAST, MOST = 0.3, 8, 300
"""Seconds of calls that are not timed, and the fewest and most that are."""


def diagnosed(name: str, device: torch.device, budget_s: float) -> dict[str, Any]:
    """What `ampopt.diagnose` says, with the samples of its counterfactuals in seconds."""
    import ampopt

    model, inputs = network(name, device)
    found = ampopt.diagnose(model, inputs, budget_s=budget_s, progress=False)
    told = found.to_dict()
    for finding, row in zip(found.findings, told["findings"], strict=True):
        if (ran := finding.counterfactual) is not None:
            row["samples"] = {"before": ran.before.samples, "after": ran.after.samples}
    kept = ("environment", "verdict", "notes", "seconds", "findings")
    return {key: told[key] for key in kept}


def sampled(run: Run, device: torch.device, seconds: float) -> list[float]:
    """Seconds of calls one after another, each waited for."""
    once(run, device)
    end = time.perf_counter() + WARM_S
    while time.perf_counter() < end:
        once(run, device)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < LEAST or (len(found) < MOST and time.perf_counter() < end):
        found.append(once(run, device))
    return found


def once(run: Run, device: torch.device) -> float:
    """Seconds of a call."""
    if run.before is not None:
        run.before()
    wait(device)
    start = time.perf_counter()
    run.call()
    wait(device)
    return time.perf_counter() - start


def main() -> None:
    """See the module."""
    name, device, what, seconds = sys.argv[1], torch.device(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    if what == "diagnose":
        print(json.dumps(diagnosed(name, device, seconds)), flush=True)
        return
    with torch.no_grad():
        run = prepared(Way(*sys.argv[5:8]), *network(name, device))
        once(run, device)
        print(READY, flush=True)
        sys.stdin.readline()
        print(json.dumps(sampled(run, device, seconds)), flush=True)


if __name__ == "__main__":
    main()
