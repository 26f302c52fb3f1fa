"""How much of the time of a first `optimize` a second one of the same model takes.

    python -m benchmarks.second_optimize [--models NAME ...] [--lanes fp32 amp] [--out DIR]

Both run in processes of their own, as on a robot that is switched on again; all caches are empty before the
first, and the second finds what that left. Writes DIR/<device>/second_optimize.json and the Markdown table
that is made from it; networks and lanes that were not run this time keep the rows that are there.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ampopt
from ampopt.system.environment import environment
from benchmarks import cold_lines, cold_start
from benchmarks.command_line import add_place, device_of, parser_for
from benchmarks.contestants import LANES
from benchmarks.race_networks import RACE, racer
from benchmarks.race_protocol import emptied
from benchmarks.results_files import Row, commit, heading, results_folder, write_table

Facts = dict[str, Any]

BUDGET_S = 60.0
"""The time budget of each call, in seconds."""


def optimize_once(network: str, lane: str, device: torch.device, budget_s: float) -> Facts:
    """The seconds of one `optimize`, what it kept, and whether an earlier call had tuned that."""
    model, inputs = racer(network)
    model, inputs = model.to(device), tuple(tensor.to(device) for tensor in inputs)
    start = time.perf_counter()
    fast = ampopt.optimize(model, inputs, precision=lane, budget_s=budget_s, progress=False)
    seconds = time.perf_counter() - start
    assert isinstance(fast, ampopt.OptimizedModule)
    tuned = any(note.startswith("tuned by an earlier call") for note in fast.report.notes)
    return {"seconds": seconds, "passes": [step.name for step in fast.program.recipe], "tuned": tuned}


def measure(network: str, lane: str, device: torch.device, budget_s: float = BUDGET_S) -> Row:
    """A network in one lane, twice within a time budget each; `error` where one of the two failed."""
    row: Row = {"network": network, "lane": lane, "commit": commit(), "environment": environment(device)}
    command = [sys.executable, "-m", "benchmarks.second_optimize", "--once"]
    command += ["--models", network, "--lanes", lane, "--device", device.type, "--budget", str(budget_s)]
    with tempfile.TemporaryDirectory(prefix="ampopt-second-") as folder:
        env = emptied(Path(folder), os.environ)
        for call in ("first", "second"):
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                return {**row, "error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
            row[call] = json.loads(done.stdout.splitlines()[-1])
    return row


def to_markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    head = ("network", "lane", "first s", "second s", "share", "the same passes", "commit")
    lines = [*heading("A second `optimize` of the same model", rows), ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        if "error" in row:
            cells = [row["error"], "–", "–", "–"]
        else:
            first, second = row["first"], row["second"]
            same = "yes" if first["passes"] == second["passes"] else "no"
            share = f"{second['seconds'] / first['seconds']:.0%}"
            cells = [f"{first['seconds']:.1f}", f"{second['seconds']:.1f}", share, same]
        lines.append("| " + " | ".join([row["network"], row["lane"], *cells, row["commit"]]) + " |")
    return "\n".join([*lines, *cold_lines.lines(rows)]) + "\n"


def main() -> None:
    """Measure every network and lane asked for and write the results after each."""
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=RACE, default=RACE, metavar="NAME")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    add_place(parser)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of each call")
    cold_start.add_option(parser)
    parser.add_argument("--once", action="store_true", help="print the facts of one call and write nothing")
    options = parser.parse_args()
    device = device_of(options)
    if options.once:
        print(json.dumps(optimize_once(options.models[0], options.lanes[0], device, options.budget)))
        return
    folder = results_folder(options.out, device)
    for network, lane in itertools.product(options.models, options.lanes):
        row = measure(network, lane, device, options.budget)
        if (network, lane) == (options.models[0], options.lanes[0]) and options.default_call:
            row = cold_start.beside(row, network, device)
        key, order = operator.itemgetter("network", "lane"), itertools.product(RACE, LANES)
        write_table(folder, "second_optimize", [row], key, order, to_markdown)
        print(to_markdown([row]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
