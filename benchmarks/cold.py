"""What a stranger gets: the default call in a cold process, on networks that nobody tuned for.

    python -m benchmarks.cold [--models NAME ...] [--seconds S] [--compile] [--budget-left S] [--again]

Each network runs in a process of its own with empty caches: `ampopt.optimize(model, x)` and nothing else,
then eager and the recipe by hand beside it, in turn. Writes DIR/<device>/cold.json, a row as soon as it is
there, and the table that is made from it. Networks that have figures of this commit are skipped, so a run
that was cut off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.cold_networks import COLD, all_names
from benchmarks.cold_start import MOST_S, default_call
from benchmarks.cold_table import to_markdown
from benchmarks.command_line import add_place, device_of, parser_for
from benchmarks.results_files import Row, commit, results_folder, write_table
from benchmarks.time_left import TimeLeft

FIRST_GUESS_S = 120.0
"""What a network takes until one has been run."""


def rows_in(file: Path) -> list[Row]:
    """The rows of a file of results; none where it is not there yet."""
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


def still_to_run(names: Sequence[str], rows: Sequence[Row], now: str) -> list[str]:
    """Those without figures of this commit; one that failed is run again, one that is skipped is not."""
    done = {row["network"] for row in rows if row["commit"] == now and "error" not in row}
    return [name for name in names if name not in done]


def write_row(folder: Path, row: Row) -> None:
    """Add or replace a network's row in cold.json and make the table anew."""
    write_table(folder, "cold", [row], operator.itemgetter("network"), all_names(), to_markdown)


def main() -> None:
    """Run every network asked for that has no figures yet, and write the results after each."""
    parser = parser_for(__doc__)
    add_options(parser)
    parser.add_argument("--models", nargs="+", choices=all_names(), default=list(COLD), metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also networks that have figures of this commit")
    options = parser.parse_args()
    device = device_of(options)
    folder, now = results_folder(options.out, device), commit()
    rows = rows_in(folder / "cold.json")
    names = options.models if options.again else still_to_run(options.models, rows, now)

    def write(row: Row) -> None:
        write_row(folder, row)
        shown = to_markdown([row]).splitlines()
        starts = (f"| {row['network']}", f"- {row['network']}")
        print(*(line for line in shown if line.startswith(starts)), sep="\n", flush=True)

    run_each(names, device, options, write, compiled=options.compile, most_s=MOST_S)


def run_each(
    names: Sequence[str],
    device: torch.device,
    options: argparse.Namespace,
    write: Callable[[Row], object],
    *,
    compiled: bool,
    thorough: bool = False,
    most_s: float,
) -> None:
    """A default call of one network after another, while there is time for one more; each row is written."""
    left = TimeLeft(options.budget_left, guess_s=FIRST_GUESS_S)
    for place, name in enumerate(names):
        if not left.another():
            print(f"no time left for {', '.join(names[place:])}", flush=True)
            return
        limit_s = left.most_s(most_s)
        ways = {"compiled": compiled, "thorough": thorough}
        write(default_call(name, device, seconds=options.seconds, most_s=limit_s, **ways))


def add_options(parser: argparse.ArgumentParser, *, compiles: bool = True) -> None:
    """The options that every benchmark of cold processes has; `compiles`: `torch.compile` is optional."""
    add_place(parser)
    parser.add_argument("--seconds", type=float, default=0.0, help="of sampling, beyond the fewest rounds")
    if compiles:
        parser.add_argument("--compile", action="store_true", help="torch.compile beside them")
    parser.add_argument(
        "--budget-left", type=float, metavar="S", help="begin no network that may end later than this"
    )


if __name__ == "__main__":
    main()
