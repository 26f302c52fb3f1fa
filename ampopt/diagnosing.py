"""`ampopt.diagnose`: why a model is slow, and why AMP is slower, with evidence that was executed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampopt.bundle.destinations import check_text
from ampopt.diagnosing_training import Asked, diagnose_training, refuse_with_train
from ampopt.diagnosis.case import Case, eager_call, own_tensors, timed_call
from ampopt.diagnosis.ceilings import ceilings_of
from ampopt.diagnosis.examine import find_all, measure, untried_note
from ampopt.diagnosis.finding import Finding
from ampopt.diagnosis.findings.input_device import moved_along
from ampopt.diagnosis.heap import KEPT, SPARE, Refilled, examine_heap, kept
from ampopt.diagnosis.operators import refuse_profiler
from ampopt.diagnosis.optimized_column import add_optimized, check_optimized
from ampopt.diagnosis.own_program import OwnKernel
from ampopt.diagnosis.result import Diagnosis
from ampopt.diagnosis.step_watch import UserStep
from ampopt.diagnosis.sweep import BatchRow, sweep
from ampopt.diagnosis.trace import write_trace
from ampopt.diagnosis.training_step import Loss, MakeOptimizer, Optimizer
from ampopt.diagnosis.verdict import verdict
from ampopt.diagnosis.watch import watch
from ampopt.errors import InputError
from ampopt.ir.arguments import as_call, as_module, number, one_of, progress_flag, refuse_more
from ampopt.ir.lanes import FP32, LANES, lanes_for
from ampopt.ir.model_copy import exact_copy, untouched_rng
from ampopt.ir.outside import keeps_variables
from ampopt.ir.signature import describe, flatten_call, tensors_of
from ampopt.measure.headline import load_now
from ampopt.search.example_call import mode_note, prepare_call, target_of
from ampopt.search.progress import progress_line
from ampopt.system.budget import Budget
from ampopt.system.environment import environment
from ampopt.system.exits import exits_refused
from ampopt.system.garbage import old_left_aside
from ampopt.system.interrupts import check_interrupted, interruptible, watched
from ampopt.system.memory import release
from ampopt.system.plain_files import path_of
from ampopt.system.process_state import imports_kept, process_kept
from ampopt.system.turns import optimizing
from ampopt.system.wording import argument

__all__ = ["Diagnosis", "Finding", "diagnose"]

DEFAULT_S = 60.0
"""The time budget in seconds, if none is given; what has begun is ended."""

SWEEPING = 0.5
"""The share of it that the batch sweep gets."""


@optimizing.taken()
@old_left_aside()
@watched()
@exits_refused()
@process_kept()
@imports_kept()
@keeps_variables
def diagnose(
    model: nn.Module,
    example_inputs: Any = None,
    *more: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str = "amp",
    batches: Sequence[int] = (),
    budget_s: float | None = None,
    device: torch.device | str | None = None,
    trace: Path | str | None = None,
    optimized: nn.Module | None = None,
    train: bool = False,
    loss: Loss | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    step: UserStep | None = None,
    progress: bool | None = None,
) -> Diagnosis:
    """Find out why a model, or its training step, is slow, and why AMP is slower than FP32.

    Eager is timed in FP32 and in AMP, each of its operators by PyTorch's profiler, and this device's own
    ceilings are measured. Every finding comes with its evidence and, where the remedy can be executed, with
    what it brought when it was. The model is never changed. It waits for other `optimize`, `compare` and
    `diagnose` calls in the process.

    Args:
        model: any module. It is measured in evaluation mode; that it is in training mode is a finding.
        example_inputs: a tuple of the positional arguments, or the only argument; None: inferred.
        more: further positional arguments raise InputError, which says what to write instead.
        example_kwargs: the keyword arguments of the example call.
        precision: the lane that is compared to FP32: "amp" or "bf16"; "fp32": none.
        batches: sizes of the first dimension to sweep in both lanes, until memory or half of the time is out.
        budget_s: seconds for everything; None: 60. What does not fit is not tried, and is noted.
        device: diagnose a copy on this device; None: the device of the weights.
        trace: a file for a trace of a few calls, for Perfetto or chrome://tracing.
        optimized: what `ampopt.optimize` has returned for this model and call: the layers get its times, and
            each of its kernels is attributed to nodes, modules and your lines, through CUDA graphs, too.
        train: diagnose a training step in its place: forward, backward, the optimizer and `zero_grad` apart,
            in FP32, AMP, channels_last, other implementations of the optimizer, on a GPU as a CUDA graph.
        loss: with `train`, the loss of the model's result; None: the mean square of its outputs.
        optimizer: with `train`, one over the model's parameters, or what makes one of parameters; None: SGD.
        step: with `train`, your own step, called as `step(model, optimizer, *args, **kwargs)` on copies. It
            is watched for faults, such as `optimizer.step()` after `scaler.step(optimizer)`, and timed, too.
        progress: show a progress line; None: if standard error is a terminal.

    Raises:
        InputError: an argument is invalid, the arguments do not fit the model, or it fails when it is called
        again; PyTorch's profiler is recording. Interrupted: Ctrl-C was pressed.
    """
    started, load = time.perf_counter(), load_now()
    with interruptible():
        progress = progress_flag(progress)
        refuse_more(more)
        one_of("precision", precision, LANES)
        refuse_profiler()
        budget = Budget(started, _budget_s(budget_s))
        sizes, traced = _batches(batches), _trace_file(trace)
        as_call(example_inputs, {} if example_kwargs is None else example_kwargs)
        given_kwargs = dict(example_kwargs or {})
        model, wrapped = as_module(model)
        where = target_of(model, example_inputs, given_kwargs, device)
        lanes = lanes_for("fp32," + precision, where)
        asked = Asked(loss, optimizer, step)
        if train:
            refuse_with_train(batches=sizes, trace=trace, optimized=optimized)
            call = example_inputs, given_kwargs
            return diagnose_training(model, call, where, lanes[-1], asked, budget, progress, wrapped, load)
        asked.refuse_without_train()
        first_s = _first_call_s(model, example_inputs, given_kwargs, where)
        original, args, kwargs, note = prepare_call(model, example_inputs, given_kwargs, device)
        given = (
            (args, kwargs) if example_inputs is None and not given_kwargs else (example_inputs, given_kwargs)
        )
        called = given[0] if isinstance(given[0], tuple) else () if given[0] is None else (given[0],)
        called, given_kwargs = moved_along(model, called, given[1], where)
        with contextlib.ExitStack() as stack:
            tell = stack.enter_context(progress_line(progress, started, budget.seconds))
            stack.enter_context(untouched_rng(where))
            stack.enter_context(torch.no_grad())  # so that no call has to switch gradients off
            tell("all", "memory")
            refilled = _refilled(original, args, kwargs, where)
            tell("all", "watched call")
            seen = watch(exact_copy(original), *own_tensors(called, given_kwargs), where)
            tell("all", "ceilings")
            case = Case(
                model=model,
                given=(called, given_kwargs),
                original=exact_copy(original),
                args=args,
                kwargs=kwargs,
                device=where,
                watched=seen,
                ceilings=ceilings_of(where, lanes[-1].dtype),
                budget=budget,
                first_call_s=first_s,
                refilled=refilled,
                load=load,
            )
            rows: list[BatchRow] = []
            own: tuple[OwnKernel, ...] = ()
            taken = 0.0 if refilled is None else refilled.taken
            stack.enter_context(kept(where, max(KEPT, SPARE * int(taken))))
            measure(case, lanes, tell)
            module = None if optimized is None else check_optimized(optimized, case)
            if sizes:
                tell("all", "batch sweep")
                sampled = [case.lanes[name] for name in case.latency]
                share = SWEEPING * budget.left_s
                call_s = sum(measured.median for measured in case.latency.values())
                rows, ended = sweep(case.original, args, kwargs, where, sampled, sizes, share, call_s, module)
                case.notes += [ended] if ended else []
            findings = find_all(case, tell)
            told_verdict = verdict(case, findings)
            if traced is not None:
                sampled_lanes = {name: case.lanes[name] for name in case.latency}
                write_trace(traced, case.original, args, kwargs, where, sampled_lanes)
            if module is not None:
                tell("all", "optimized program")
                own = add_optimized(case, module)
    notes = [told for told in (wrapped, note, mode_note(model, case.original, "measured")) if told]
    release(where)
    return Diagnosis(
        model=type(model).__name__,
        environment=environment(where),
        inputs=tuple(describe(tensor) for tensor in tensors_of(flatten_call(args, kwargs)[0])),
        verdict=told_verdict,
        findings=findings,
        latency=case.latency,
        device_time=case.device_time,
        ceilings=case.ceilings,
        layers=case.layers,
        accuracy=case.accuracy,
        sweep=tuple(rows),
        notes=(*notes, *case.notes, *untried_note(case.untried, budget)),
        seconds=time.perf_counter() - started,
        own=own,
        usage=case.usage,
    )


def _budget_s(seconds: float | None) -> float:
    if seconds is None:
        return DEFAULT_S
    return number("budget_s", seconds, positive=True, advice="a positive, finite number of seconds")


def _batches(batches: object) -> tuple[int, ...]:
    found = tuple(batches) if isinstance(batches, Iterable) else ()
    are_sizes = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in found)
    if not isinstance(batches, Iterable) or not are_sizes:
        raise InputError(f"{argument('batches', batches)}: give whole numbers from 1 on, as (1, 2, 4, 8)")
    return found


def _trace_file(trace: object) -> Path | None:
    """Where the trace goes. Raises InputError where no file can be, before anything is measured."""
    if trace is None:
        return None
    path = path_of(trace)
    try:
        check_text(path)
    except InputError as error:
        raise InputError(f"trace: {error}") from error
    return path


def _refilled(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Refilled | None:
    """See `examine_heap`; None where the model fails when it is called again, which others tell."""
    try:
        own_args, own_kwargs = own_tensors(args, kwargs)
        call = eager_call(exact_copy(model), own_args, own_kwargs, device, FP32)
        return examine_heap(call, device, timed_call(call, device))
    except Exception as error:
        check_interrupted(error)
        return None


def _first_call_s(model: nn.Module, inputs: Any, kwargs: dict[str, Any], device: torch.device) -> float:
    """Seconds of the model's first call in this process; 0 where it fails, which `prepare_call` tells."""
    if inputs is None and not kwargs:
        return 0.0
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    try:
        with untouched_rng(device):
            copied = exact_copy(model).eval().to(device)
            args, kwargs = own_tensors(args, kwargs)
            return timed_call(eager_call(copied, args, kwargs, device, FP32), device)
    except (Exception, SystemExit) as error:
        check_interrupted(error)
        return 0.0
