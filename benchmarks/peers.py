"""The race: every network, every peer and ampopt side by side, in both regimes, at each border.

    python -m benchmarks.peers [--models NAME ...] [--lanes fp32 amp] [--io fp32 lane] [--threads N]
                               [--contestants NAME ...] [--thorough [NAME ...]]
                               [--missing] [--budget-left S] [--gpus INDEX ...]

Every peer is at its best, see `benchmarks.contestants`; each is prepared in a process of its own: those that
only compile side by side, those that time alternatives alone. Then all are sampled in turn, a block of calls
at a time, in an order that is drawn anew for every round. One that fails has a row with its reason. Writes
DIR/<device>/race.json, a row of a network, lane, border and number of threads as soon as it is there, with
the table and the chart that are made from it; rows that were not run this time stay. On two GPUs two races
run at once, and no more: they would starve each other of the host.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
from pathlib import Path

import torch

from benchmarks import cold_start
from benchmarks.cold import rows_in
from benchmarks.command_line import add_place, device_of, parser_for
from benchmarks.contestants import LANES, Contestant, contestants, ios_of
from benchmarks.peers_table import draw, to_markdown
from benchmarks.race import Row, race
from benchmarks.race_networks import RACE
from benchmarks.race_on_gpus import MOST_AT_ONCE, longest_first, run_all
from benchmarks.results_files import commit, results_folder, write_table
from benchmarks.time_left import TimeLeft
from benchmarks.ways import IOS

FIRST_GUESS_S = 240.0
"""What a race takes until one has been run."""

THREADS = (None, 1, 2)


def key_of(row: Row) -> tuple[str, str, str, int | None]:
    """What a row is of."""
    return row["network"], row["lane"], row["io"], row["threads"]


def write_row(folder: Path, row: Row) -> None:
    """Put a row into race.json, and remake the table and the chart."""
    order = itertools.product(RACE, LANES, IOS, THREADS)
    draw(write_table(folder, "race", [row], key_of, order, to_markdown), folder / "race.png")


def main() -> None:
    """Race every network asked for, and write the results after each."""
    options = options_of(sys.argv[1:])
    device = device_of(options)
    _narrow(options)
    folder = results_folder(options.out, device)
    rows = rows_in(folder / "race.json")
    races = [
        (network, lane, io)
        for network, lane in itertools.product(options.models, options.lanes)
        for io in ios_of(lane)
        if io in options.io
    ]
    if options.missing:
        now = commit()
        done = {key_of(row) for row in rows if row["commit"] == now}
        races = [race for race in races if (*race, options.threads) not in done]
    if options.gpus:
        done_one = functools.partial(write_row, folder)
        if failed := run_all(longest_first(races, rows), options.gpus, _passed_on(options), done_one):
            sys.exit("no row of " + ", ".join(map(", ".join, failed)))
        return
    left = TimeLeft(options.budget_left, guess_s=FIRST_GUESS_S)
    for place, (network, lane, io) in enumerate(races):
        if not left.another():
            print("no time left for " + "; ".join(", ".join(race) for race in races[place:]), flush=True)
            return
        entered = entered_in(options, network, lane, contestants(device))
        if not entered:
            continue
        row = race(network, entered, device, io=io, threads=options.threads, seconds=options.seconds)
        if place == 0 and options.default_call:
            row = cold_start.beside(row, network, device)
        write_row(folder, row)


def entered_in(
    options: argparse.Namespace, network: str, lane: str, everybody: list[Contestant]
) -> list[Contestant]:
    """Who runs in a race."""
    thorough = options.thorough is not None and network in (options.thorough or RACE)
    names = options.contestants or [c.name for c in everybody if thorough or not c.thorough]
    return [c for c in everybody if c.name in names and c.lane == lane]


def options_of(words: list[str]) -> argparse.Namespace:
    """What the command line asks for."""
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=RACE, default=RACE, metavar="NAME")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="by default all")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument("--io", nargs="+", choices=IOS, default=list(IOS), help="what goes in and comes out")
    slow = "those that take minutes to prepare, too, on these networks; without names on all"
    parser.add_argument("--thorough", nargs="*", choices=RACE, metavar="NAME", help=slow)
    parser.add_argument(
        "--gpus", nargs="+", type=int, metavar="INDEX", help="a race at once on each, two at most"
    )
    parser.add_argument("--cores", nargs="+", type=int, metavar="INDEX", help="use these alone")
    parser.add_argument(
        "--threads", type=int, choices=THREADS[1:], help="cores and threads of every contestant on a CPU"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="of sampling, beyond the fewest rounds")
    parser.add_argument("--missing", action="store_true", help="only what has no row of this commit")
    parser.add_argument("--budget-left", type=float, metavar="S", help="begin no race that may end later")
    cold_start.add_option(parser)
    add_place(parser)
    options = parser.parse_args(words)
    if options.gpus and len(options.gpus) > MOST_AT_ONCE:
        parser.error(f"at most {MOST_AT_ONCE} races run at once: more starve each other of the host")
    everybody = contestants(torch.device(options.device))
    if unknown := set(options.contestants or ()) - {contestant.name for contestant in everybody}:
        parser.error(f"no contestant {', '.join(sorted(unknown))}: {', '.join(c.name for c in everybody)}")
    if options.threads and options.device == "cuda":
        parser.error("--threads is of races on a CPU")
    return options


def _narrow(options: argparse.Namespace) -> None:
    """Keep to the cores asked for, and to as many as there are threads: so do the contestants' processes."""
    if not (options.cores or options.threads):
        return
    cores = options.cores or sorted(os.sched_getaffinity(0))
    if options.threads and len(cores) < options.threads:
        sys.exit(f"--threads {options.threads}: there are only {len(cores)} cores")
    os.sched_setaffinity(0, cores[: options.threads])
    if options.threads:
        torch.set_num_threads(options.threads)


def _passed_on(options: argparse.Namespace) -> list[str]:
    """The options of a race that each of several at once has, too."""
    passed = ["--device", options.device, "--seconds", str(options.seconds), "--no-default-call"]
    for name in ("contestants", "thorough"):
        if (values := getattr(options, name)) is not None:
            passed += [f"--{name}", *values]
    return passed


if __name__ == "__main__":
    main()
