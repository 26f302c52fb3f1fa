"""Do the ONNX files verify, and are they faster than a plain export? Workloads, families, and ten of timm.

    python -m benchmarks.exports [--models NAME ...] [--precisions fp32 fp16] [--no-timing]

Each network runs in a process of its own. Writes DIR/<device>/exports.json and the Markdown table that is
made from it, network by network; networks and precisions that were not run this time keep their rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.capture import Captured, capture, private_copy
from ampopt.environment import environment
from ampopt.measure import latency, shortest_of_two
from ampopt.onnx_export import PRECISIONS, export_onnx
from ampopt.onnx_knobs import changed
from ampopt.onnx_options import CPU, CUDA, SessionOptions
from ampopt.onnx_session import Array, OnnxRunner, relative_error
from ampopt.onnx_tuning import PAUSE_S, tune
from ampopt.quiet import quiet
from ampopt.sampling import Sampler, gain, interleave
from benchmarks.export_networks import NETWORKS, network
from benchmarks.exports_table import line, to_markdown
from benchmarks.results_files import commit, results_folder

TUNING_S = 3.0
"""For the sweep of the options of one file, loading included."""

TIMING_S = 3.0
"""For the calls in turn of one file and its peers."""

LONG_BATCH_S = 0.5
"""A batch of several samples whose call takes longer on a CPU is not timed."""

MOST_S = 1800.0
"""After which a network's process is ended."""

_TF32 = {"provider_options": {"use_tf32": "1"}}


def rows_of(
    name: str, precisions: Sequence[str], device: torch.device, *, timing: bool
) -> Iterator[dict[str, Any]]:
    """Export a network in each precision, and time it; a failure is a row with its reason."""
    model, inputs = network(name)
    model, inputs = model.to(device), tuple(tensor.to(device) for tensor in inputs)
    captured: Captured | None = None
    with tempfile.TemporaryDirectory(prefix="ampopt-exports-") as folder:
        for precision in precisions:
            row: dict[str, Any] = {"workload": name, "precision": precision}
            row |= {"environment": environment(device), "commit": commit()}
            ours = Path(folder) / f"{precision}.onnx"
            try:
                original = private_copy(model)
                captured = captured or capture(original, inputs, {}, device)
                report = export_onnx(original, captured, (), ours, precision=precision).to_dict()
                row["report"] = {key: value for key, value in report.items() if key != "path"}
            except Exception as failure:
                row["error"] = f"{type(failure).__name__}: {failure}"
            if timing and "report" in row:
                row["timing"] = _timing(model, inputs, ours, Path(folder) / "plain.onnx", precision)
            yield row


def _timing(
    model: nn.Module, inputs: tuple[Tensor, ...], ours: Path, plain: Path, precision: str
) -> dict[str, Any]:
    """The timing of our file beside the plain one, which is made where it is not there yet."""
    if precision == "fp16" and inputs[0].device.type == "cpu":
        return {"not_timed": "not timed: a CPU computes it in FP32"}
    try:
        if not plain.exists():
            with quiet():
                torch.onnx.export(model, inputs, plain, dynamo=True, verbose=False)
        return timed(ours, plain, inputs, precision)
    except Exception as failure:
        return {"not_timed": f"{type(failure).__name__}: {failure}"}


def timed(ours: Path, plain: Path, inputs: tuple[Tensor, ...], precision: str) -> dict[str, Any]:
    """Latencies of both files in this process, called in turn, and the ratios of those taken together.

    Ours has tuned options, the other ONNX Runtime's own. These allow TF32 on a GPU, which ours does not: for
    FP32 each file is timed there with the other's setting, too. `difference` is the relative error of our
    outputs against the plain file's.
    """
    device, arrays = inputs[0].device, tuple(tensor.cpu().numpy() for tensor in inputs)
    provider = CUDA if device.type == "cuda" else CPU
    runners = {"plain": OnnxRunner(plain, SessionOptions(provider))}
    seconds = shortest_of_two(functools.partial(runners["plain"], *arrays), device, long_s=LONG_BATCH_S)
    if device.type == "cpu" and len(arrays[0]) > 1 and seconds > LONG_BATCH_S:
        return {"not_timed": f"not timed: a batch of {len(arrays[0])} takes {seconds:.1f} s"}
    tuning = tune(ours, arrays, seconds=TUNING_S, providers=[provider])
    pairs = {"plain / ours": ("plain", "ours")}
    runners["ours"] = OnnxRunner(ours, tuning.best)
    if provider == CUDA and precision == "fp32":
        runners["plain without TF32"] = OnnxRunner(plain, SessionOptions.default(provider))
        runners["ours with TF32"] = OnnxRunner(ours, changed(tuning.best, _TF32))
        pairs["plain / ours, both with TF32"] = ("plain", "ours with TF32")
        pairs["plain / ours, both without TF32"] = ("plain without TF32", "ours")
    samplers = {name: _sampler(runner, arrays, device) for name, runner in runners.items()}
    times = interleave(samplers, seconds=TIMING_S)
    outputs = (runners[name](*arrays) for name in ("ours", "plain"))
    return {
        **{name: measured.to_dict() for name, measured in times.items()},
        "gains": {key: dataclasses.asdict(gain(times[a], times[b])) for key, (a, b) in pairs.items()},
        "difference": max(map(relative_error, *outputs)),
        "tuning": {"session": tuning.session(), "ratio": tuning.ratio},
    }


def _sampler(runner: OnnxRunner, arrays: tuple[Array, ...], device: torch.device) -> Sampler:
    """Samples a runner's latency once the threads of the runner before it have stopped spinning."""
    sample = latency(functools.partial(runner, *arrays), device)

    def rested() -> float:
        if device.type == "cpu":
            time.sleep(PAUSE_S)
        return sample()

    return rested


def write_rows(folder: Path, new: Sequence[dict[str, Any]]) -> None:
    """Add rows to exports.json, in place of those of the same network and precision, and remake the table."""
    file = folder / "exports.json"
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    kept = {(row["workload"], row["precision"]): row for row in (*rows, *new)}
    order = ((name, precision) for name in NETWORKS for precision in PRECISIONS)
    ordered = [kept[key] for key in order if key in kept]
    file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    (folder / "exports.md").write_text(to_markdown(ordered), encoding="utf-8")


def main() -> None:
    """Run every network asked for in a process of its own, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--models", nargs="+", choices=NETWORKS, default=NETWORKS, metavar="NAME")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--device", default=default, choices=["cuda", "cpu"])
    parser.add_argument("--no-timing", action="store_true", help="export and verify only")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, with --no-timing only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs > 1 and not options.no_timing:
        parser.error("--jobs needs --no-timing: networks that run at the same time slow each other down")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if options.one:
        rows: list[dict[str, Any]] = []
        with torch.no_grad():
            for row in rows_of(options.models[0], options.precisions, device, timing=not options.no_timing):
                rows.append(row)
                options.one.write_text(json.dumps(rows), encoding="utf-8")
        return
    folder = results_folder(options.out, device)
    with ThreadPoolExecutor(options.jobs) as pool:
        for rows in pool.map(functools.partial(in_own_process, options=options), options.models):
            write_rows(folder, rows)
            print("\n".join(map(line, rows)), flush=True)


def in_own_process(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a network; those that its process did not come to say how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.exports", "--models", name, "--one", str(file)]
        command += ["--device", options.device, "--precisions", *options.precisions]
        command += ["--no-timing"] * options.no_timing
        try:
            status = subprocess.run(command, check=False, timeout=MOST_S).returncode
            end = f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            end = f"the process took longer than {MOST_S:.0f} s"
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    missing = options.precisions[len(rows) :]
    return [*rows, *({"workload": name, "precision": precision, "error": end} for precision in missing)]


if __name__ == "__main__":
    main()
