"""Is the speed-up the same each time? Several cold default calls of the same network.

    python -m benchmarks.steady [--models NAME ...] [--runs 10] [--budget-left S]

The figure is the interquartile range over the median of the *speed-up* over eager FP32, which is timed beside
ampopt in each cold process; beside it stand those of the two times that it is made of. Appends to
DIR/<device>/steady.json, run by run, and makes the table from it; runs of this commit that are there already
count.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cold import FIRST_GUESS_S, add_options, rows_in
from benchmarks.cold_lines import EAGER, OURS
from benchmarks.cold_networks import all_names
from benchmarks.cold_start import MOST_S, default_call
from benchmarks.cold_table import seconds_to
from benchmarks.command_line import device_of, parser_for
from benchmarks.regimes import REGIMES, speedup
from benchmarks.results_files import Row, commit, heading, results_folder
from benchmarks.time_left import TimeLeft

STEADY = ("resnet18", "mobilenet-v3-small", "encdecmil18", "efficientnet_b0", "hrnet_w18_small")
"""Five networks: two that everybody knows, a small segmenter, and two that nobody tuned for."""

RUNS = 10


def run_of(row: Row) -> Row:
    """What is kept of a cold run: the speed-ups in both regimes and how they came about."""
    kept = {
        key: row[key] for key in ("network", "commit", "environment", "chosen", "passes", "prepare_s", "load")
    }
    own, eager = (row["contestants"][name] for name in (OURS, EAGER))
    gains = {regime: speedup(eager[regime], own[regime]).ratio for regime in REGIMES}
    kept["nearly_s"] = seconds_to(row)
    return {**kept, "speedups": gains, "ms": {regime: own[regime]["p50_ms"] for regime in REGIMES}}


def relative_range(values: Sequence[float]) -> float:
    """The interquartile range over the median."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def to_markdown(rows: Sequence[Row]) -> str:
    """A line for each network, regime and commit: how many runs, their speed-ups, range over median."""
    head = (
        *("network", "regime", "runs", "lanes", "least", "median", "most", "range / median"),
        *("of ampopt's time", "of eager's time", "90 % of the gain after s", "prepared in s", "commit"),
    )
    lines = [*heading("The same speed-up each time", rows), ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for network, now in dict.fromkeys((row["network"], row["commit"]) for row in rows):
        runs = [r for r in rows if (r["network"], r["commit"]) == (network, now) and "error" not in r]
        if len(runs) < 2:
            continue
        lanes = ", ".join(dict.fromkeys(run["chosen"] for run in runs))
        for regime in REGIMES:
            gains = [run["speedups"][regime] for run in runs]
            of_all = (min(gains), statistics.median(gains), max(gains))
            cells = [network, regime, str(len(runs)), lanes, *(f"{gain:.2f}" for gain in of_all)]
            soon = [run["nearly_s"] for run in runs if run.get("nearly_s") is not None]
            own = [run["ms"][regime] for run in runs]
            eager = [ms * gain for ms, gain in zip(own, gains, strict=True)]
            cells += [f"{relative_range(values):.1%}" for values in (gains, own, eager)]
            cells.append(f"{statistics.median(soon):.1f}" if soon else "–")
            cells.append(f"{statistics.median(run['prepare_s'] for run in runs):.1f}")
            lines.append("| " + " | ".join([*cells, now]) + " |")
    failed = [f"- {row['network']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*lines, *([""] if failed else []), *failed]) + "\n"


def append(folder: Path, row: Row) -> list[Row]:
    """Add a run to steady.json and make the table anew; all runs."""
    rows = [*rows_in(folder / "steady.json"), row]
    (folder / "steady.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (folder / "steady.md").write_text(to_markdown(rows), encoding="utf-8")
    return rows


def main() -> None:
    """Make the runs that are missing, network by network, and write the results after each."""
    parser = parser_for(__doc__)
    add_options(parser)
    parser.add_argument("--models", nargs="+", choices=all_names(), default=list(STEADY), metavar="NAME")
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    device = device_of(options)
    folder, now = results_folder(options.out, device), commit()
    rows, left = rows_in(folder / "steady.json"), TimeLeft(options.budget_left, guess_s=FIRST_GUESS_S)
    for name in options.models:
        of_this = [r for r in rows if (r["network"], r["commit"]) == (name, now) and "error" not in r]
        for _ in range(options.runs - len(of_this)):
            if not left.another():
                print("no time left", flush=True)
                return
            row = default_call(name, device, seconds=options.seconds, most_s=left.most_s(MOST_S))
            rows = append(folder, run_of(row) if "contestants" in row else row)
            print(name, rows[-1].get("speedups") or rows[-1], flush=True)


if __name__ == "__main__":
    main()
