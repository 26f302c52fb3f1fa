"""The default call on as many kinds of networks as there are: who is slower, who fails, and why.

    python -m benchmarks.breadth [--models NAME ...] [--seconds S] [--budget-left S] [--again] [--thorough]

As `benchmarks.cold`, with `torch.compile` beside it, with `--thorough` in its slowest mode, too, on the
networks of `benchmarks.breadth_networks`. Adds a row to DIR/<device>/breadth.json after each network, and
makes the table and the histogram anew. It goes on over many commits: networks that have figures of any commit
are skipped; one that failed is run again at another commit, after those that never ran. A row tells what was
tried and lost, and why.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.breadth_networks import BREADTH
from benchmarks.breadth_table import draw, standing, to_markdown
from benchmarks.cold import add_options, rows_in, run_each
from benchmarks.cold_table import seconds_to
from benchmarks.command_line import device_of, parser_for
from benchmarks.results_files import Row, commit, results_folder, write_table

MOST_S = 3600.0
"""After which a cold process is ended: a detector takes seconds a call on a CPU, and is called 200 times."""


def still_to_run(names: Sequence[str], rows: Sequence[Row], now: str) -> list[str]:
    """Those that never ran, then those without figures that were last tried at another commit."""
    known = {row["network"]: row for row in rows}
    never = [name for name in names if name not in known]
    return never + [
        name
        for name in names
        if name in known and "contestants" not in known[name] and known[name]["commit"] != now
    ]


def write_row(folder: Path, row: Row) -> None:
    """Add or replace a network's row in breadth.json; make the table and the histogram anew."""
    kept = {key: value for key, value in row.items() if key != "report"}  # of 30 kB each
    if "report" in row:
        kept |= {"nearly_s": seconds_to(row), "lost": lost(row["report"])}
    rows = write_table(folder, "breadth", [kept], operator.itemgetter("network"), BREADTH, to_markdown)
    draw(rows, folder / "breadth.png")


def lost(report: Mapping[str, Any]) -> list[str]:
    """What was tried and not kept, and why: without it a row does not tell why a program is slow."""
    return [
        f"{entry['lane']} {entry['pass']}: {entry['reason']}"
        for entry in report["passes"]
        if entry["verdict"] in ("failed", "reverted")
    ]


def main() -> None:
    """Run every network asked for that has no figures yet, and write the results after each."""
    parser = parser_for(__doc__)
    add_options(parser, compiles=False)
    parser.add_argument("--models", nargs="+", choices=BREADTH, default=list(BREADTH), metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also networks that have figures")
    parser.add_argument("--thorough", action="store_true", help="torch.compile's max-autotune, too")
    options = parser.parse_args()
    device = device_of(options)
    folder = results_folder(options.out, device)
    rows = rows_in(folder / "breadth.json")
    names = options.models if options.again else still_to_run(options.models, rows, commit())

    def write(row: Row) -> None:
        write_row(folder, row)
        print(f"{row['network']}: {row.get('skipped') or '; '.join(standing([row])[1:])}", flush=True)

    ways = {"compiled": True, "thorough": options.thorough}
    run_each(names, device, options, write, most_s=MOST_S, **ways)


if __name__ == "__main__":
    main()
