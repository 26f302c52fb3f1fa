"""What runs on the robot: a saved network in a new process, its start, its memory and its latency.

    python -m benchmarks.deployed [--models NAME ...] [--threads N] [--budget-left S]

A network is optimized by the default call in a cold process with empty caches, and saved. Then the bundle
(`ampopt.robot` without PyTorch, `ampopt.load` with it), eager, plain exports in ONNX Runtime and OpenVINO,
and ncnn, MNN and LiteRT where their environments are made (`make peers-cpu`) run it, each in a new process
that does nothing else, and are timed in turn, on a CPU; `ampopt.load` twice, the second time with the caches
that the first has left. Writes DIR/<device>/deployed.json, a row as soon as
a network is done, and the table that is made from it. Networks that have figures of this commit are
skipped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ampopt.measure.headline import load_now
from ampopt.system.environment import environment
from benchmarks import engine_process
from benchmarks.cold import rows_in, still_to_run
from benchmarks.cold_start import MOST_S, compiled_modules
from benchmarks.command_line import RESULTS, parser_for
from benchmarks.deployed_process import SAVE
from benchmarks.deployed_table import to_markdown
from benchmarks.deployed_ways import AGAIN, WAYS, cores
from benchmarks.engine_venvs import python_of
from benchmarks.engines_on_cpu import ENGINES
from benchmarks.race_networks import RACE
from benchmarks.race_process import error_of, write_parts
from benchmarks.race_protocol import Racer, racing_environment
from benchmarks.regimes import in_turn, summary
from benchmarks.results_files import Row, commit, results_folder, write_table
from benchmarks.time_left import TimeLeft

NETWORKS = ("resnet18", "mobilenet-v3-small", "regnet-y-400mf", "resnext50", "cropunet", "encdecmil18")

FIRST_GUESS_S = 150.0

PAUSE_S = 0.1
"""Before a block: the threads of the one before may spin for 50 ms."""


def measure(network: str, threads: int) -> Row:
    """One network: what saving it took, and each way's facts and times, or why it has none."""
    row: Row = {"network": network, "commit": commit(), "threads": threads}
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="ampopt-deployed-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_parts(network, device, folder, as_onnx=True)
        env = {**racing_environment("save", folder, threads), **compiled_modules()}
        done = subprocess.run(command(SAVE, folder, threads), env=env, timeout=MOST_S, check=False)
        if done.returncode:
            return {**row, "error": f"its default call ended with status {done.returncode}"}
        row["saved"] = json.loads((folder / "saved.json").read_text(encoding="utf-8"))
        ways: dict[str, Any] = {}
        racers: dict[str, Racer] = {}
        environments: dict[str, dict[str, str]] = {}
        for way in WAYS:
            first = environments.get(AGAIN.get(way, ""))
            environments[way] = first or racing_environment(way, folder, threads)
            try:
                racers[way] = _racer(way, folder, threads, environments[way], stack)
                ways[way] = _facts(way, racers[way], folder)
            except (RuntimeError, ValueError) as failure:
                ways[way] = {"error": str(failure)}
        ready = {w: functools.partial(racers[w].ask, "block") for w in ways if "error" not in ways[w]}
        for way, regimes in in_turn(ready, seconds=0.0, pause_s=PAUSE_S).items():
            ways[way] |= {regime: summary(blocks) for regime, blocks in regimes.items()}
    load = load_now()
    row |= {"environment": environment(device), "load": None if load is None else load.average}
    return {**row, "ways": ways}


def command(way: str, folder: Path, threads: int) -> list[str]:
    """What starts a way's process. Raises RuntimeError where its engine's environment was not made."""
    python = str(python_of(way)) if way in ENGINES else sys.executable
    return [python, "-m", "benchmarks.deployed_process", way, str(folder), str(threads)]


def _racer(way: str, folder: Path, threads: int, env: dict[str, str], stack: contextlib.ExitStack) -> Racer:
    """A way's process. Raises RuntimeError where its engine is missing, or does not convert the network."""
    if way in ENGINES:
        engine_process.converted(str(python_of(way)), way, folder, threads)
    racer = Racer(command(way, folder, threads), env)
    stack.callback(racer.end)
    return racer


def _facts(way: str, racer: Racer, folder: Path) -> dict[str, Any]:
    """What a way took, and its error. Raises RuntimeError where it fails, ValueError for other outputs."""
    found = {**racer.ask("make"), **racer.ask("choose"), **racer.ask("settle")}
    with np.load(folder / f"{way}.npz") as stored:
        outputs = [torch.from_numpy(array) for array in stored.values()]
    return {**found, "relative_error": error_of(outputs, torch.load(folder / "reference.pt"))}


def write_row(folder: Path, row: Row) -> None:
    """Add or replace a network's row in deployed.json and make the table anew."""
    write_table(folder, "deployed", [row], lambda each: each["network"], RACE, to_markdown)


def main() -> None:
    """Measure every network asked for, and write the results after each."""
    parser = parser_for(__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", nargs="+", choices=RACE, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=cores(), help="of every process; by default all cores")
    parser.add_argument(
        "--budget-left", type=float, metavar="S", help="begin none that may end later than this"
    )
    options = parser.parse_args()
    folder = results_folder(options.out, torch.device("cpu"))
    names = still_to_run(options.models, rows_in(folder / "deployed.json"), commit())
    left = TimeLeft(options.budget_left, guess_s=FIRST_GUESS_S)
    for place, name in enumerate(names):
        if not left.another():
            print(f"no time left for {', '.join(names[place:])}", flush=True)
            return
        row = measure(name, options.threads)
        write_row(folder, row)
        print(*to_markdown([row]).splitlines()[5:], sep="\n", flush=True)


if __name__ == "__main__":
    main()
