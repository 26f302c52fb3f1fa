"""What runs in the cold process: one default call, then eager and the recipe by hand beside its result.

It writes the facts as JSON to a file. Started by `benchmarks.cold_start`, with empty caches, as
`benchmarks.cold_import`.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ampopt
from ampopt.ir.in_float64 import SCOPES, copy_in_float64
from ampopt.ir.model_copy import private_copy
from ampopt.ir.numerics import relative_error
from ampopt.ir.signature import flatten_outputs
from ampopt.measure.headline import load_now
from ampopt.system.environment import environment
from benchmarks import by_compile, by_hand
from benchmarks.anybody import anybody
from benchmarks.by_compile import Options
from benchmarks.by_hand import Call, Inputs
from benchmarks.cold_lines import AUTOTUNED, BY_HAND, COMPILED, EAGER, EAGER_AMP, OURS
from benchmarks.cold_networks import UnknownNetworkError
from benchmarks.command_line import parser_for
from benchmarks.race_protocol import peak_bytes
from benchmarks.regimes import Block, Subject, block, in_turn, summary
from benchmarks.results_files import told
from benchmarks.subjects import subject_of

Facts = dict[str, Any]

T = TypeVar("T")

PAUSE_S = 0.1
"""Before a block on a CPU: the threads of the one before may spin for 50 ms."""


def measure(
    network: str,
    device: torch.device,
    *,
    seconds: float = 0.0,
    compiled: bool = False,
    thorough: bool = False,
    known: Callable[[Facts], object] = lambda _: None,
) -> Facts:
    """Everything of one network; `known` gets what the first call gave before peers can go wrong."""
    model, inputs = anybody(network)
    model, inputs = model.to(device), pytree.tree_map_only(Tensor, lambda t: t.to(device), inputs)
    facts, fast = first_call(model, inputs, device)
    known({**facts, "error": "its process ended before peers were made"})
    calls: dict[str, Call] = {OURS: fast}
    contestants: dict[str, Facts] = {OURS: {}}
    first: dict[str, list[Tensor]] = {}
    pool = peers_thread(device)  # it is not ended, see `leave`
    with torch.no_grad():
        expected, facts["no_reference"] = _expected(model, inputs)
        first[OURS] = effect(fast, inputs)
        for name, ways in peers(device, compiled, thorough).items():
            known({**facts, "error": f"its process ended while {name} was made"})
            failures: list[str] = []
            for make in ways:
                start = time.perf_counter()
                try:
                    call, effects = of_peers(pool, functools.partial(_made, make, model, inputs))
                    of_peers(pool, functools.partial(call, *fresh(inputs)))  # it may fail when called again
                except Exception as failure:
                    failures.append(told(failure))
                    continue
                calls[name], first[name] = call, effects
                contestants[name] = {"prepare_s": time.perf_counter() - start, "other_ways": failures}
                break
            else:
                contestants[name] = {"error": "; ".join(failures)}
        blocks: dict[str, Callable[[str], Block]] = {}
        for name, call in calls.items():
            run: Callable[..., Any] = _directly if name == OURS else functools.partial(of_peers, pool)
            contestants[name]["relative_error"] = (
                None if expected is None else error_of(first[name], expected)
            )
            subject = subject_of(functools.partial(call, *inputs), device)
            blocks[name] = functools.partial(_block, run, subject)
        known({**facts, "error": "its process ended while all were timed"})
        timed = in_turn(blocks, seconds=seconds, pause_s=PAUSE_S if device.type == "cpu" else 0.0)
    for name, regimes in timed.items():
        contestants[name] |= {regime: summary(found) for regime, found in regimes.items()}
    return {**facts, "contestants": contestants}


Make = Callable[[nn.Module, Inputs], Call]


def _made(make: Make, model: nn.Module, inputs: Inputs) -> tuple[Call, list[Tensor]]:
    """A peer of a copy of the model, whose state is as ampopt's is, and what its first call does."""
    call = make(private_copy(model), fresh(inputs))
    return call, effect(call, inputs)


def effect(call: Call, inputs: Inputs) -> list[Tensor]:
    """The outputs of a call, and its inputs after it: a model may write to them, and a graph to copies."""
    given = fresh(inputs)
    outputs = flatten_outputs(call(*given))[0]
    return [*outputs, *(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))]


def fresh(inputs: Inputs) -> Inputs:
    """Inputs of a call's own, which it may write to."""
    found: Inputs = pytree.tree_map_only(Tensor, torch.clone, inputs)
    return found


def _expected(model: nn.Module, inputs: Inputs) -> tuple[list[Tensor] | None, str | None]:
    """The outputs in float64, or why there are none: some models make float32 tensors of their own."""
    try:
        return reference(model, inputs), None
    except Exception as failure:
        return None, told(failure)


def peers_thread(device: torch.device) -> Executor | None:
    """A thread for peers on a GPU; None on a CPU, where they run in this one.

    PyTorch caches cuDNN's plans by thread: in ampopt's the search would find those that were chosen without.
    On a CPU each thread that computes has OpenMP's threads of its own. Where these are more than cores, they
    sleep between operators, and RAFT's 1,400 took 190 ms in eager for 141 on two cores, in either thread.
    """
    return ThreadPoolExecutor(1) if device.type == "cuda" else None


def of_peers(pool: Executor | None, work: Callable[[], T]) -> T:
    """Do a peer's work with cuDNN's search on."""

    def searching() -> T:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            with torch.no_grad():
                return work()
        finally:
            torch.backends.cudnn.benchmark = before

    return searching() if pool is None else pool.submit(searching).result()


def _directly(work: Callable[[], T]) -> T:
    return work()


def _block(run: Callable[[Callable[[], Block]], Block], subject: Subject, regime: str) -> Block:
    return run(functools.partial(block, subject, regime))


def first_call(model: nn.Module, inputs: Inputs, device: torch.device) -> tuple[Facts, Call]:
    """The call that the README shows, timed, and what came of it. It does not change the model."""
    start = time.perf_counter()
    fast = ampopt.optimize(model, inputs[0] if len(inputs) == 1 else inputs)
    ended = time.perf_counter()
    report = fast.report.to_dict()
    lane = report["lanes"].get(report["chosen"], {})
    load = load_now()
    return {
        "environment": environment(device),
        "load": None if load is None else load.average,
        "prepare_s": ended - start,
        "chosen": report["chosen"],
        "judged": list(report["lanes"]),
        "passes": lane.get("passes", []),
        "error_reported": lane.get("error"),
        "notes": report["notes"],
        "report": report,
        "peak_host_bytes": peak_bytes(),
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }, fast


def peers(device: torch.device, compiled: bool, thorough: bool = False) -> dict[str, tuple[Make, ...]]:
    """What a user could have instead within minutes; all take and give float32 that stays the caller's.

    Each is made in the first of its ways that works. `torch.compile` has one option: freezing on a CPU, and
    its CUDA graphs (reduce-overhead) under autocast on a GPU; where these fail, because a model keeps tensors
    of an earlier call, it has none. `thorough` adds max-autotune with coordinate descent, for minutes.
    """
    on_gpu = device.type == "cuda"
    half = torch.float16 if on_gpu else torch.bfloat16
    recipe = by_hand.half_channels_last_fold_graph if on_gpu else by_hand.channels_last_fold
    found: dict[str, tuple[Make, ...]] = {
        EAGER: (by_hand.eager,),
        EAGER_AMP: (by_hand.autocast(half),),
        BY_HAND: (recipe,),
    }
    ways: dict[str, Options] = {COMPILED: {}} if compiled else {}
    ways |= {AUTOTUNED: by_compile.AUTOTUNE} if thorough else {}
    for name, options in ways.items():
        frozen = functools.partial(by_compile.compiled, options={**by_compile.FREEZING, **options})
        on_cuda = (functools.partial(way, options=options) for way in (_in_its_graphs, _without_graphs))
        found[name] = tuple(on_cuda) if on_gpu else (frozen,)
    return found


def _without_graphs(model: nn.Module, inputs: Inputs, *, options: Options) -> Call:
    torch.compiler.reset()
    return by_compile.compiled(by_hand.autocast(torch.float16)(model, inputs), inputs, options=options)


def _in_its_graphs(model: nn.Module, inputs: Inputs, *, options: Options) -> Call:
    amp = by_hand.autocast(torch.float16)(model, inputs)
    inner = by_compile.compiled(amp, inputs, options={**options, "triton.cudagraphs": True})

    def call(*given: Any) -> object:
        torch.compiler.cudagraph_mark_step_begin()  # a model may keep tensors of its last call
        return pytree.tree_map_only(Tensor, torch.clone, inner(*given))

    return call


def reference(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The effect of a call of the model in float64, and of what it makes itself where that is of float32."""
    given = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
    failures: list[Exception] = []
    for scope in SCOPES:
        try:
            exact = copy_in_float64(model)
            with scope():
                return effect(exact, given)
        except Exception as failure:
            failures.append(failure)
    raise failures[-1] from failures[0]


def error_of(found: list[Tensor], expected: list[Tensor]) -> float | None:
    """The largest relative error of an effect; None where it has NaN, infinities or other shapes."""
    if len(found) != len(expected):
        return None
    error = max(relative_error(ours, wanted) for ours, wanted in zip(found, expected, strict=True))
    return error if math.isfinite(error) else None


def main(import_s: float) -> None:
    """See the module; to import ampopt took so many seconds."""
    faulthandler.enable()
    parser = parser_for(__doc__)
    parser.add_argument("network")
    parser.add_argument("device", type=torch.device)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--thorough", action="store_true")
    options = parser.parse_args()

    kept: Facts = {}

    def write(facts: Facts) -> None:
        kept.update({"import_s": import_s, **facts})
        options.file.write_text(json.dumps(kept), encoding="utf-8")

    asked = {"seconds": options.seconds, "compiled": options.compile, "thorough": options.thorough}
    try:
        facts = measure(options.network, options.device, **asked, known=write)
        kept.clear()
        write(facts)
    except UnknownNetworkError as unknown:
        write({"skipped": str(unknown)})
    except Exception as failure:
        write({"error": told(failure)})
    if options.compile:
        leave()


def leave() -> NoReturn:
    """End the process without tidying up.

    `torch.compile` keeps its CUDA graphs by thread and frees them when the thread of the peers has ended:
    some processes were killed by that (SIGSEGV) with all figures made.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
