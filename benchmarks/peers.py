"""The race: every network, every peer and ampopt side by side.

    python -m benchmarks.peers [--models NAME ...] [--lanes fp32 amp] [--contestants NAME ...]
                               [--thorough [NAME ...]] [--gpus INDEX ...]

Each contestant is prepared in a process of its own. Those that time alternatives meanwhile follow each
other; on a GPU the rest, which only compile and capture, are prepared beside them. Then all are warmed up,
one after another, and sampled in turn, call by call, in an order that is drawn anew for every round, on the
same inputs. One that fails has a row with its reason. On several GPUs several races run at once. Writes
DIR/<device>/peers.json, the table and the chart that are made from it; networks and lanes that were not run
this time keep what they had.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import operator
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from ampopt.measure.sampling import interleave, rested
from ampopt.system.environment import environment
from benchmarks.contestants import LANES, Contestant, contestants
from benchmarks.exports_timing import PAUSE_S
from benchmarks.peers_table import draw, to_markdown
from benchmarks.race_networks import RACE
from benchmarks.race_on_gpus import longest_first, run_all
from benchmarks.race_process import Racer, write_parts
from benchmarks.results_files import commit, results_folder, update

SECONDS, LEAST_ROUNDS = 20.0, 15

BESIDE = 3
"""Contestants that are prepared beside those that tune."""


def race(
    network: str, entered: Sequence[Contestant], device: torch.device, seconds: float = SECONDS
) -> dict[str, Any]:
    """Run one network: for every contestant its facts and times, or why it has none."""
    now, begun = commit(), time.perf_counter()
    rows: dict[str, dict[str, Any]] = {each.name: {"lane": each.lane, "commit": now} for each in entered}
    with tempfile.TemporaryDirectory(prefix="ampopt-race-") as folder, contextlib.ExitStack() as stack:
        racers: dict[str, Racer] = {}

        def start(name: str) -> None:
            racers[name] = Racer(name, device, Path(folder))
            stack.callback(racers[name].end)

        def ask(name: str, request: str) -> None:
            try:
                rows[name] |= racers[name].ask(request)
            except RuntimeError as failure:
                rows[name]["error"] = str(failure)
                racers[name].end()

        def prepare(name: str) -> None:
            if name not in racers:
                start(name)
            ask(name, "prepare")
            print(f"{network}: {name}: {_said(rows[name])}", flush=True)

        def tell(what: str) -> None:
            print(f"{network}: {what} after {time.perf_counter() - begun:.0f} s", flush=True)

        for each in entered if device.type == "cuda" else ():  # they load their libraries side by side
            start(each.name)
        write_parts(network, device, Path(folder))
        tell("reference computed")
        with ThreadPoolExecutor(BESIDE if device.type == "cuda" else 1) as pool:
            others = [pool.submit(prepare, each.name) for each in entered if not each.tunes]
            if device.type != "cuda":
                wait(others)
            for each in entered:
                if each.tunes:
                    prepare(each.name)
            for other in others:
                other.result()
        tell("all prepared")
        for name in [name for name in racers if "error" not in rows[name]]:
            ask(name, "settle")
        tell("all warmed up")
        pause = PAUSE_S if device.type == "cpu" else 0.0
        samplers = {
            name: rested(functools.partial(racer.ask, "sample"), pause)
            for name, racer in racers.items()
            if "error" not in rows[name]
        }
        order = random.Random(0)
        for name, times in interleave(samplers, seconds=seconds, least=LEAST_ROUNDS, order=order).items():
            rows[name] |= times.to_dict()
        tell("all sampled")
        if device.type == "cuda":
            for name in samplers:
                rows[name]["bytes"] = freed(racers[name], device)
    return {
        "network": network,
        "environment": environment(device),
        "commit": now,
        "contestants": rows,
    }


def freed(racer: Racer, device: torch.device) -> int:
    """End a contestant; the bytes of GPU memory that come back, those of its CUDA context among them."""
    before = torch.cuda.mem_get_info(device)[0]
    racer.end()
    return torch.cuda.mem_get_info(device)[0] - before


def _said(row: dict[str, Any]) -> str:
    return row.get("error") or f"prepared in {row['prepare_s']:.1f} s, error {row['relative_error']:.1e}"


def write_row(folder: Path, row: dict[str, Any]) -> None:
    """Put a network's row into peers.json, lane by lane, and remake the table and the chart."""
    file = folder / "peers.json"
    for old in _rows(folder):
        if old["network"] == row["network"]:
            row = _with_other_lanes(row, old)
    ordered = update(file, [row], operator.itemgetter("network"), RACE)
    (folder / "peers.md").write_text(to_markdown(ordered), encoding="utf-8")
    draw(ordered, folder / "peers.png")


def _rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "peers.json"
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


def _with_other_lanes(row: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """A row with the contestants of an older one whose lanes it has not; all commits are then named."""
    lanes = {each["lane"] for each in row["contestants"].values()}
    kept = {name: each for name, each in old["contestants"].items() if each["lane"] not in lanes}
    if not kept:
        return row
    everybody = {**kept, **row["contestants"]}
    commits = dict.fromkeys(each["commit"] for each in everybody.values())
    return {**row, "commit": ", ".join(commits), "contestants": everybody}


def main() -> None:
    """Race every network asked for, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--models", nargs="+", choices=RACE, default=RACE, metavar="NAME")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="by default all")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    slow = "those that take minutes to prepare, too, on these networks; without names on all"
    parser.add_argument("--thorough", nargs="*", choices=RACE, metavar="NAME", help=slow)
    parser.add_argument("--gpus", nargs="+", type=int, metavar="INDEX", help="a race at once on each")
    parser.add_argument("--cores", nargs="+", type=int, metavar="INDEX", help="use these alone")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of sampling for each network")
    parser.add_argument("--device", default=default, choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    everybody = contestants(device)
    if unknown := set(options.contestants or ()) - {contestant.name for contestant in everybody}:
        parser.error(f"no contestant {', '.join(sorted(unknown))}: {', '.join(c.name for c in everybody)}")
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    folder = results_folder(options.out, device)
    if options.gpus:
        races = longest_first(itertools.product(options.models, options.lanes), _rows(folder))
        done = functools.partial(write_row, folder)
        if failed := run_all(races, options.gpus, _passed_on(options), done):
            sys.exit("no row of " + ", ".join(map(", ".join, failed)))
        return
    for network in options.models:
        thorough = options.thorough is not None and network in (options.thorough or RACE)
        names = options.contestants or [c.name for c in everybody if thorough or not c.thorough]
        entered = [c for c in everybody if c.name in names and c.lane in options.lanes]
        write_row(folder, race(network, entered, device, options.seconds))


def _passed_on(options: argparse.Namespace) -> list[str]:
    """The options of a race that each of several at once has, too."""
    passed = ["--device", options.device, "--seconds", str(options.seconds)]
    for name in ("contestants", "thorough"):
        if (values := getattr(options, name)) is not None:
            passed += [f"--{name}", *values]
    return passed


if __name__ == "__main__":
    main()
