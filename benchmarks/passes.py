"""What each pass does, on every workload, in FP32 and in AMP, beside what a user would write by hand.

    python -m benchmarks.passes [--models NAME ...] [--budget 60] [--out DIR] [--device cuda|cpu]

Each workload runs in a process of its own. Writes DIR/<device>/passes.json and the Markdown table that is
made from it; workloads that were not run this time keep the rows that are there, with their own labels.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ampopt import OptimizedModule, optimize
from ampopt.errors import AmpoptError
from ampopt.ir.numerics import relative_error
from ampopt.ir.signature import flatten_outputs
from ampopt.measure.clocks import latency
from ampopt.measure.sampling import interleave
from ampopt.system.environment import environment
from ampopt.system.flags import cuda_math
from benchmarks import by_hand, cold_start
from benchmarks.command_line import add_place, device_of, parser_for
from benchmarks.host_time import beyond_replay
from benchmarks.models import CPU_WORKLOADS, WORKLOADS
from benchmarks.results_files import commit, results_folder, write_results

SECONDS = 3.0
"""Spent on the side-by-side timing of all contestants of one workload."""


def contestants(device: torch.device) -> dict[str, Any]:
    """What ampopt is compared with on a device, by name."""
    if device.type == "cpu":
        return {"eager fp32": by_hand.eager, "eager amp": by_hand.autocast(torch.bfloat16)}
    return {
        "eager fp32": by_hand.eager,
        "eager amp": by_hand.autocast(torch.float16),
        "fp32 + graph by hand": functools.partial(by_hand.cuda_graph, copied=True),
        "fp16 + channels_last + fold + graph by hand": by_hand.half_channels_last_fold_graph,
    }


def strict_fp32(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """TF32 off for the block."""
    return cuda_math(tf32=False, search=False) if device.type == "cuda" else contextlib.nullcontext()


def measure_workload(name: str, device: torch.device, budget_s: float) -> dict[str, Any]:
    """Optimize one workload in both lanes and time everything side by side, TF32 off."""
    workload = WORKLOADS[name]
    model = workload.model().to(device)
    inputs = tuple(tensor.to(device) for tensor in workload.inputs())
    row: dict[str, Any] = {"workload": name, "environment": environment(device), "commit": commit()}
    calls: dict[str, Any] = {}
    optimized: dict[str, OptimizedModule] = {}
    with strict_fp32(device):  # so that "as you call it now" is strict FP32 too
        for lane in ("fp32", "amp"):
            try:
                fast = optimize(model, inputs, precision=lane, budget_s=budget_s, cache=False, progress=False)
                row[lane] = fast.report.to_dict()
                assert isinstance(fast, OptimizedModule)  # every workload is one graph
                calls[f"ampopt {lane}"] = optimized[lane] = fast
                print(fast.report, flush=True)
            except AmpoptError as failure:
                row[lane] = {"error": str(failure)}
                print(f"{name} {lane}: {failure}", flush=True)
    reference = flatten_outputs(WORKLOADS[name].model().double().to(device)(*(t.double() for t in inputs)))[0]
    row["contestants"] = {}
    with strict_fp32(device):
        for contestant, make in contestants(device).items():
            try:
                calls[contestant] = _in_new_thread(functools.partial(make, model, inputs))
                calls[contestant](*inputs)
            except Exception as failure:
                calls.pop(contestant, None)
                row["contestants"][contestant] = {"error": f"{type(failure).__name__}: {failure}"}
        timed = interleave(
            {key: latency(functools.partial(call, *inputs), device) for key, call in calls.items()},
            seconds=SECONDS,
        )
        row["beyond_replay_us"] = {
            key: beyond_replay(call, inputs, device) for key, call in optimized.items()
        }
        for key, call in calls.items():
            outputs = flatten_outputs(call(*inputs))[0]
            pairs = zip(outputs, reference, strict=True)
            worst = max(relative_error(out, ref) for out, ref in pairs)
            row["contestants"][key] = {**timed[key].to_dict(), "relative_error": worst}
    return row


def _in_new_thread(make: Callable[[], Any]) -> Any:
    """Make a contestant where no cuDNN plan is cached yet: PyTorch caches them by thread."""

    def work() -> Any:
        with torch.no_grad():
            return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def main() -> None:
    """Run every workload asked for in a process of its own, and write the results."""
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each lane of each workload")
    add_place(parser)
    cold_start.add_option(parser)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = device_of(options)
    if options.one:
        with torch.no_grad():
            row = measure_workload(options.models[0], device, options.budget)
        Path(options.one).write_text(json.dumps(row), encoding="utf-8")
        return
    names = options.models or (list(WORKLOADS) if device.type == "cuda" else list(CPU_WORKLOADS))
    folder = results_folder(options.out, device)
    for name in names:
        row = _in_own_process(name, options)
        if name == names[0] and options.default_call:
            row = cold_start.beside(row, name, device)
        write_results(folder, row)


def _in_own_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks.passes", "--models", name, "--one", str(file)]
        command += ["--budget", str(options.budget), "--device", options.device]
        status = subprocess.run(command, check=False).returncode
        if status or not file.exists():
            return {"workload": name, "error": f"the process ended with status {status}"}
        row: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return row


if __name__ == "__main__":
    main()
