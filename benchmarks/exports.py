"""Do the ONNX files verify, and are they faster than a plain export? Workloads, families, and ten of timm.

    python -m benchmarks.exports [--models NAME ...] [--precisions fp32 fp16] [--no-timing]

Each network runs in processes of its own, one that exports and one that times. Writes
DIR/<device>/exports.json and the Markdown table that is made from it, network by network; networks and
precisions that were not run this time keep their rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ampopt.deploy.onnx_export import PRECISIONS, export_onnx
from ampopt.ir.capture import Captured, capture
from ampopt.ir.model_copy import private_copy
from ampopt.ort.options import CPU, CUDA
from ampopt.system.environment import environment
from ampopt.system.quiet import quiet
from benchmarks import cold_start
from benchmarks.command_line import add_place, device_of, parser_for
from benchmarks.export_networks import NETWORKS, network
from benchmarks.exports_table import line, to_markdown
from benchmarks.results_files import commit, results_folder, write_table

MOST_S = 1800.0
"""After which a network's process is ended."""


def rows_of(
    name: str, precisions: Sequence[str], device: torch.device, folder: Path, *, plain: bool
) -> Iterator[dict[str, Any]]:
    """Export a network into `folder` in each precision; a failure is a row with its reason.

    With `plain` the files to compare with are there before: inputs.npz, and plain.onnx if it can be made.
    """
    model, inputs = network(name)
    untimed: dict[str, Any] = {}
    if plain:
        np.savez(folder / "inputs.npz", *(tensor.numpy() for tensor in inputs))
        try:
            with quiet():
                torch.onnx.export(model, inputs, folder / "plain.onnx", dynamo=True, verbose=False)
        except Exception as failure:
            untimed = {"timing": {"not_timed": f"no plain export: {type(failure).__name__}: {failure}"}}
    model, inputs = model.to(device), tuple(tensor.to(device) for tensor in inputs)
    captured: Captured | None = None
    for precision in precisions:
        row: dict[str, Any] = {"workload": name, "precision": precision}
        row |= {"environment": environment(device), "commit": commit(), **untimed}
        try:
            original = private_copy(model)
            captured = captured or capture(original, inputs, {}, device)
            file = folder / f"{precision}.onnx"
            report = export_onnx(original, captured, (), file, precision=precision).to_dict()
            row["report"] = {key: value for key, value in report.items() if key != "path"}
        except Exception as failure:
            row["error"] = f"{type(failure).__name__}: {failure}"
        yield row


def write_rows(folder: Path, new: Sequence[dict[str, Any]]) -> None:
    """Add rows to exports.json, in place of those of the same network and precision, and remake the table."""
    order = ((name, precision) for name in NETWORKS for precision in PRECISIONS)
    key = operator.itemgetter("workload", "precision")
    write_table(folder, "exports", new, key, order, to_markdown)


def main() -> None:
    """Run every network asked for in processes of its own, and write the results."""
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=NETWORKS, default=NETWORKS, metavar="NAME")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    add_place(parser)
    parser.add_argument("--no-timing", action="store_true", help="export and verify only")
    parser.add_argument("--jobs", type=int, default=1, help="networks exported at a time; all before timing")
    cold_start.add_option(parser)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = device_of(options)
    if options.one:
        rows: list[dict[str, Any]] = []
        with torch.no_grad():
            plain = not options.no_timing
            for row in rows_of(options.models[0], options.precisions, device, options.one, plain=plain):
                rows.append(row)
                (options.one / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        return
    results = results_folder(options.out, device)
    at_once = len(options.models) if options.jobs > 1 else 1
    for start in range(0, len(options.models), at_once):
        with tempfile.TemporaryDirectory(prefix="ampopt-exports-") as scratch:
            run_networks(options.models[start : start + at_once], options, Path(scratch), results)


def run_networks(names: Sequence[str], options: argparse.Namespace, scratch: Path, results: Path) -> None:
    """Export networks, as many at a time as `--jobs` says; then time them one after another."""
    folders = [scratch / name.replace("/", "-") for name in names]
    exports = functools.partial(exported, options=options)
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, folder, rows in zip(names, folders, pool.map(exports, names, folders), strict=True):
            if options.no_timing:
                publish(results, with_default_call(rows, name, options))
            else:
                (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    for name, folder in () if options.no_timing else zip(names, folders, strict=True):
        rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        timed = with_timing(rows, folder, CUDA if options.device == "cuda" else CPU)
        publish(results, with_default_call(timed, name, options))
        shutil.rmtree(folder)


def with_default_call(
    rows: Sequence[dict[str, Any]], name: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of a network, the first with a cold default call if it is the first network asked for."""
    first, *others = rows
    if name != options.models[0] or not options.default_call:
        return [first, *others]
    device = device_of(options)
    return [cold_start.beside(first, name, device), *others]


def publish(results: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows and print them."""
    write_rows(results, rows)
    print("\n".join(map(line, rows)), flush=True)


def exported(name: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a network; those that its process did not come to say how it ended."""
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.exports", "--models", name, "--one", str(folder)]
    command += ["--device", options.device, "--precisions", *options.precisions]
    command += ["--no-timing"] * options.no_timing
    try:
        status = subprocess.run(command, check=False, timeout=MOST_S).returncode
        end = f"the process ended with status {status}"
    except subprocess.TimeoutExpired:
        end = f"the process took longer than {MOST_S:.0f} s"
    file = folder / "rows.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    missing = options.precisions[len(rows) :]
    return [*rows, *({"workload": name, "precision": precision, "error": end} for precision in missing)]


def with_timing(rows: Sequence[dict[str, Any]], folder: Path, provider: str) -> list[dict[str, Any]]:
    """Rows with the timing of those that were verified, measured in a process of its own."""
    limits = {
        row["precision"]: max(output["limit"] for output in row["report"]["outputs"])
        for row in rows
        if "report" in row and "timing" not in row
    }
    if not limits:
        return list(rows)
    command = [sys.executable, "-m", "benchmarks.exports_timing", str(folder), "--provider", provider]
    command += ["--tolerances", *(f"{precision}={limit}" for precision, limit in limits.items())]
    try:
        ended = subprocess.run(command, check=False, timeout=MOST_S, stdout=subprocess.PIPE, text=True)
        found = json.loads(ended.stdout) if ended.returncode == 0 else {}
        end = f"its process ended with status {ended.returncode}"
    except subprocess.TimeoutExpired:
        found, end = {}, f"its process took longer than {MOST_S:.0f} s"
    lost = {"not_timed": end}
    return [
        {**row, "timing": found.get(row["precision"], lost)} if row["precision"] in limits else row
        for row in rows
    ]


if __name__ == "__main__":
    main()
