"""Are the counterfactuals of `ampopt.diagnose` true? Each is measured again, alone, in cold processes.

    python -m benchmarks.counterfactuals [--models NAME ...] [--device cpu] [--processes 3] [--budget-left S]

A network is diagnosed in one process with empty caches. Then what each finding's "before" and "after" are is
written in plain PyTorch (`benchmarks.counterfactual_ways`) and timed by itself, in `--processes` processes,
of which one runs at a time; the figure is the median of all calls. Writes DIR/<device>/counterfactuals.json,
a row as soon as a network is done, and the table that is made from it. Networks that have figures of this
commit are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ampopt.measure.headline import load_now
from ampopt.measure.sampling import Measurement
from benchmarks import cold_start
from benchmarks.cold import rows_in, still_to_run
from benchmarks.command_line import add_place, device_of, parser_for
from benchmarks.counterfactual_networks import NETWORKS
from benchmarks.counterfactual_process import CLOCKS, READY
from benchmarks.counterfactual_ways import Way, ways_of
from benchmarks.counterfactuals_table import to_markdown
from benchmarks.race_protocol import emptied
from benchmarks.results_files import Row, commit, results_folder, write_table
from benchmarks.time_left import TimeLeft

BUDGET_S = {"cuda": 25.0, "cpu": 60.0}
"""Seconds for a diagnosis: a network is done within a minute on a GPU."""

PROCESSES = {"cuda": 1, "cpu": 3}
"""Times that a way is measured: on a CPU, processes differ by where their memory lies."""

MOST_S = 600.0

FIRST_GUESS_S = {"cuda": 60.0, "cpu": 240.0}


def measure(name: str, device: torch.device, options: argparse.Namespace) -> Row:
    """A network's diagnosis, and each of its counterfactuals beside the same thing alone."""
    row: Row = {"network": name, "commit": commit()}
    with tempfile.TemporaryDirectory(prefix="ampopt-counterfactuals-") as folder:
        environment = {
            **emptied(Path(folder), os.environ),
            **cold_start.compiled_modules(),
            **_threads(options.threads),
        }
        budget_s = str(options.budget or BUDGET_S[device.type])
        done = subprocess.run(
            _command(name, device, options.clock, "diagnose", budget_s),
            stdout=subprocess.PIPE,
            env=environment,
            timeout=MOST_S,
            check=False,
        )
        if done.returncode:
            return {**row, "error": f"its diagnosis ended with status {done.returncode}"}
        told = json.loads(done.stdout.splitlines()[-1])
        findings = [each for each in told.pop("findings") if "samples" in each]
        pairs = [(each, ways_of(each)) for each in findings]
        ways = dict.fromkeys(way for _, pair in pairs for way in pair or ())
        alone: dict[Way, list[list[float] | str]] = {way: [] for way in ways}
        for _ in range(options.processes or PROCESSES[device.type]):
            for way, samples in _timed(name, device, list(ways), options, environment).items():
                alone[way].append(samples)
    load = load_now()
    row |= {**told, "clock": options.clock, "load": None if load is None else load.average}
    row["counterfactuals"] = [_beside(each, pair, alone) for each, pair in pairs if pair is not None]
    row["not_measured"] = [each["name"] for each, pair in pairs if pair is None]
    return row


def _threads(count: int | None) -> dict[str, str]:
    return {} if count is None else {f"{library}_NUM_THREADS": str(count) for library in ("OMP", "MKL")}


def _command(name: str, device: torch.device, *more: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.counterfactual_process", name, str(device), *more]


def _timed(
    name: str,
    device: torch.device,
    ways: Sequence[Way],
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> dict[Way, list[float] | str]:
    """The samples of each way from a process of its own, or why there are none.

    All get ready together, which costs most of their time, and then each is timed while the others wait.
    """
    found: dict[Way, list[float] | str] = {}
    with contextlib.ExitStack() as stack:
        processes = {}
        for way in ways:
            asked = (options.clock, "time", str(options.seconds), way.lane, way.remedy, way.of)
            command = _command(name, device, *asked)
            processes[way] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**environment, **way.environment},
                text=True,
            )
            stack.callback(processes[way].kill)
        are_ready = {way: _line(process, READY) == READY for way, process in processes.items()}
        for way, process in processes.items():
            said = ""
            if are_ready[way]:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                said = _line(process)
            status = process.wait()
            found[way] = json.loads(said) if said else f"its process ended with status {status}"
    return found


def _line(process: subprocess.Popen[str], wanted: str | None = None) -> str:
    """The next line that a process writes, or the next one that is as wanted; empty at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        if wanted is None or line.strip() == wanted:
            return line.strip()
    return ""


def _beside(
    finding: Mapping[str, Any], pair: tuple[Way, Way], alone: Mapping[Way, Sequence[list[float] | str]]
) -> dict[str, Any]:
    """A counterfactual, each of its figures as diagnosed and alone."""
    told = finding["counterfactual"]
    kept = {"finding": finding["name"], "lane": finding["lane"], "says": told["change"], "of": told["of"]}
    figures = {}
    for side, way in zip(("before", "after"), pair, strict=True):
        samples = [each for each in alone[way] if not isinstance(each, str)]
        errors = [each for each in alone[way] if isinstance(each, str)]
        figures[side] = {"way": str(way), "diagnosed": _figure(finding["samples"][side])}
        if samples:
            figures[side]["alone"] = _figure([s for each in samples for s in each])
            figures[side]["processes_ms"] = [_figure(each)["ms"] for each in samples]
        if errors:
            figures[side]["error"] = errors[0]
    return {**kept, "gain": told["gain"], **figures}


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample below which about this share of them lies."""
    return sorted(samples)[int(share * len(samples))]


def _figure(samples: Sequence[float]) -> dict[str, Any]:
    """The median in ms with its interval of 95 %, the fastest tenth's end, and the number of samples."""
    measured = Measurement(tuple(samples))
    low, high = measured.interval_of_median()
    rounded = {"ms": measured.median, "low": low, "high": high, "tenth": quantile(measured.samples, 0.1)}
    return {**{key: round(1e3 * s, 6) for key, s in rounded.items()}, "samples": len(samples)}


def write_row(folder: Path, row: Row) -> None:
    """Add or replace a network's row in counterfactuals.json and make the table anew."""
    write_table(folder, "counterfactuals", [row], lambda each: each["network"], NETWORKS, to_markdown)


def main() -> None:
    """Diagnose and measure every network asked for, and write the results after each."""
    parser = parser_for(__doc__)
    add_place(parser)
    parser.add_argument("--models", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing, for each process")
    parser.add_argument("--processes", type=int, help="that time a way; 1 on a GPU, 3 on a CPU")
    parser.add_argument("--threads", type=int, help="of every process; as many as PyTorch takes")
    parser.add_argument(
        "--clock", default="wall", choices=CLOCKS, help="cpu, with --threads 1, where others use the machine"
    )
    parser.add_argument("--budget", type=float, metavar="S", help="of a diagnosis; 25 on a GPU, 60 on a CPU")
    parser.add_argument("--again", action="store_true", help="also networks that have figures of this commit")
    parser.add_argument(
        "--budget-left", type=float, metavar="S", help="begin none that may end later than this"
    )
    cold_start.add_option(parser)
    options = parser.parse_args()
    device = device_of(options)
    folder, now = results_folder(options.out, device), commit()
    rows = rows_in(folder / "counterfactuals.json")
    names = options.models if options.again else still_to_run(options.models, rows, now)
    left = TimeLeft(options.budget_left, guess_s=FIRST_GUESS_S[device.type])
    for place, name in enumerate(names):
        if not left.another():
            print(f"no time left for {', '.join(names[place:])}", flush=True)
            return
        row = measure(name, device, options)
        if name == options.models[0] and options.default_call:
            row = cold_start.beside(row, name, device)
        write_row(folder, row)
        print(*to_markdown([row]).splitlines()[5:], sep="\n", flush=True)


if __name__ == "__main__":
    main()
