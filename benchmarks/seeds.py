"""The five questions that ampopt comes from, on today's hardware: training steps and inference.

    python -m benchmarks.seeds [--models NAME ...] [--device cpu] [--optimize] [--budget-left S]

Every way of training is timed in turn with the others, synchronised and warmed up, with its peak memory on a
GPU; then the parts of the step in FP32; then calls in evaluation mode: eager, autocast, and apex's O1 and O2
as ampopt's policies; with `--optimize` also its default call. The first workload has one in a cold process,
too. Writes DIR/<device>/seeds.json row by row, and the table and the plots from it.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import ampopt
from ampopt.diagnosis.training_step import Step, Subject, fp32, made, parts_of
from ampopt.ir.capture import capture
from ampopt.ir.lanes import LANES
from ampopt.ir.model_copy import private_copy
from ampopt.ir.transform import replay
from ampopt.measure.clocks import latency, synchronize
from ampopt.measure.sampling import interleave
from ampopt.passes import BakeAutocast
from ampopt.system.environment import environment
from benchmarks import cold_start
from benchmarks.command_line import add_place, device_of, parser_for
from benchmarks.results_files import Row, commit, results_folder, write_table
from benchmarks.seeds_plots import draw
from benchmarks.seeds_table import to_markdown
from benchmarks.seeds_workloads import SEEDS, Seed
from benchmarks.time_left import TimeLeft
from benchmarks.training_steps import ways

MOST_S = 5.0
"""Seconds of a training step in FP32 above which a workload is left out."""

LEAST, MOST = 5, 200
"""Rounds of samples."""

FIRST_GUESS_S = 20.0


def measure(seed: Seed, device: torch.device, *, seconds: float, most_s: float, optimize: bool) -> Row:
    """All figures of a workload; `skipped` says why there are none."""
    row: Row = {
        "question": seed.question,
        "workload": seed.name,
        "commit": commit(),
        "environment": environment(device),
    }
    model = seed.workload.model().to(device)
    inputs = seed.workload.inputs(device=device)
    subject = Subject(model, inputs, seed.loss(model, inputs))
    first = fp32(subject)
    if (step_s := _seconds(first, device)) > most_s:
        return {**row, "skipped": f"a training step takes {step_s:.1f} s here"}
    makes = {name: functools.partial(make, subject) for name, make in ways(device).items()}
    row["training"] = timed(makes, device, seconds)
    row["parts"] = {name: round(1e3 * s, 6) for name, s in parts_of(first, seconds / 4).items()}
    row["inference"] = _inference(model, inputs, device, seconds, optimize=optimize)
    return row


def _seconds(step: Step, device: torch.device) -> float:
    """Seconds of the second call."""
    step()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def timed(makes: Mapping[str, Callable[[], Step]], device: torch.device, seconds: float) -> dict[str, Row]:
    """Each step's time, sampled in turn, and on a GPU the peak of what it takes; `error` where it fails."""
    steps, found = dict[str, Step](), dict[str, Row]()
    for name, make in makes.items():
        try:
            gc.collect()  # what is given back later would hide the peak
            steps[name], peak = made(make, device)
            found[name] = {"peak_mib": None if peak is None else round(peak / 2**20, 1)}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    samplers = {name: latency(step, device) for name, step in steps.items()}
    for name, measured in interleave(samplers, seconds=seconds, least=LEAST, most=MOST).items():
        found[name] |= measured.to_dict()
    return found


def _inference(
    model: nn.Module, inputs: tuple[Tensor, ...], device: torch.device, seconds: float, *, optimize: bool
) -> dict[str, Row]:
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16

    def under_autocast(called: nn.Module, given: tuple[Tensor, ...]) -> Step:
        def call() -> object:
            with torch.autocast(device.type, dtype):
                return called(*given)

        return call

    def policy(name: str) -> Step:
        program = LANES["amp"][device.type].start(capture(private_copy(model), inputs, {}, device).program)
        return functools.partial(replay((BakeAutocast(policy=name),), program).run, *inputs)

    def nhwc() -> Step:
        moved = copy.deepcopy(model)
        moved.to(memory_format=torch.channels_last)
        given = tuple(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
        return under_autocast(moved, given)

    makes: dict[str, Callable[[], Step]] = {
        "fp32": lambda: functools.partial(model, *inputs),
        "amp": lambda: under_autocast(model, inputs),
        "amp + channels_last": nhwc,
        "O1": lambda: policy("O1"),
        "O2": lambda: policy("O2"),
    }
    if optimize:
        makes["ampopt"] = lambda: functools.partial(ampopt.optimize(model, inputs), *inputs)
    with torch.no_grad():
        return timed(makes, device, seconds)


def main() -> None:
    """Measure every workload asked for, and write the results after each."""
    parser = parser_for(__doc__)
    add_place(parser)
    parser.add_argument("--models", nargs="+", choices=list(SEEDS), default=list(SEEDS), metavar="NAME")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of sampling, for training and inference each"
    )
    parser.add_argument("--most-s", type=float, default=MOST_S, help="longest FP32 step of a workload")
    parser.add_argument("--optimize", action="store_true", help="ampopt's default call, too")
    parser.add_argument(
        "--budget-left", type=float, metavar="S", help="begin none that may end later than this"
    )
    cold_start.add_option(parser)
    options = parser.parse_args()
    device = device_of(options)
    folder, left = results_folder(options.out, device), TimeLeft(options.budget_left, guess_s=FIRST_GUESS_S)
    for name in options.models:
        if not left.another():
            print("no time left", flush=True)
            break
        row = measure(
            SEEDS[name], device, seconds=options.seconds, most_s=options.most_s, optimize=options.optimize
        )
        if name == options.models[0] and options.default_call:
            row = cold_start.beside(row, name, device)
        rows = write_table(folder, "seeds", [row], lambda each: each["workload"], SEEDS, to_markdown)
        draw(rows, folder)
        print(name, json.dumps({k: v.get("p50_ms") for k, v in row.get("training", {}).items()}), flush=True)


if __name__ == "__main__":
    main()
