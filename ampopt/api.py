"""`ampopt.optimize`: makes a model faster for inference and verifies the result."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.engines.cuda_graphs import Outputs
from ampopt.engines.quick_call import bind_ahead
from ampopt.errors import CaptureError, LackError, TooLargeError, UncopyableError, not_a_graph
from ampopt.ir.arguments import flag, progress_flag, refuse_more
from ampopt.ir.capture import capture
from ampopt.ir.lane_io import LaneIO, original_of
from ampopt.ir.model_copy import device_of, is_training
from ampopt.ir.outside import keeps_variables
from ampopt.ir.signature import flatten_call
from ampopt.ir.size_ranges import Asked
from ampopt.measure.fault_check import Faults
from ampopt.measure.metric import Metric
from ampopt.measure.report import CALLED_NOW
from ampopt.search.example_call import checked_call, mode_note, prepare_call, target_of
from ampopt.search.lane_probe import seconds_of_a_call
from ampopt.search.named_passes import Passes
from ampopt.search.optimizer import Optimizer
from ampopt.search.options import Options
from ampopt.search.partly_optimized import PartlyOptimizedModule, as_it_was
from ampopt.search.progress import ProgressLine, progress_line
from ampopt.search.regions import PartwiseOptimizer
from ampopt.search.rehearsal import Sandbox
from ampopt.search.waiting_threads import fewer_threads_if_they_wait
from ampopt.system.budget import (
    CALLS_OF_A_TRIAL,
    CALLS_TO_CAPTURE,
    CALLS_TO_LOOK,
    DEFAULT_CALLS,
    DEFAULT_S,
    MODULE_S,
    WHOLE,
    Budget,
    calls_to_verify,
    default_budget_s,
)
from ampopt.system.exits import exits_refused
from ampopt.system.garbage import old_left_aside
from ampopt.system.interrupts import check_interrupted, interruptible, watched
from ampopt.system.memory import release
from ampopt.system.process_state import process_kept
from ampopt.system.turns import optimizing
from ampopt.system.wording import argument

WORTH_A_STAGE_S = 20.0
"""From this time budget on, a GPU's rehearsal process is started at once: it is probably needed."""


@optimizing.taken()
@old_left_aside()
@watched()
@exits_refused()
@process_kept()
@keeps_variables
def optimize(
    model: nn.Module,
    example_inputs: Any = None,
    *more: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str = "auto",
    tolerance: float | None = None,
    metric: Metric | None = None,
    budget_s: float | None = None,
    device: torch.device | str | None = None,
    outputs: Outputs = "copy",
    policy: str = "amp",
    amp_dtype: torch.dtype | None = None,
    exclude: Sequence[str] = (),
    cache: bool = True,
    nan: Faults = "keep",
    progress: bool | None = None,
    strict: bool = False,
    passes: Passes | None = None,
    io: str = "original",
    dynamic: Asked | None = None,
) -> OptimizedModule | PartlyOptimizedModule:
    """Optimize a model for inference, and verify the result.

    Every pass is applied, verified against `model` in float64 and timed before and after, in FP32 and in
    mixed precision; it is kept only if it is correct and faster. `model` and the process state are never
    changed. Concurrent calls from several threads run one after another, because they would disturb each
    other's timing.

    Args:
        model: any module, as it is in evaluation mode; or an exported program, in the mode of its export.
        example_inputs: a tuple of the model's positional arguments, or the only argument (a tensor, a list, a
            dict). None: inferred from the first layer, if possible.
        more: further positional arguments raise InputError, which says what to write instead.
        example_kwargs: the keyword arguments of the example call.
        precision: a lane, "fp32", "amp" (mixed: float16 on CUDA, bfloat16 on a CPU) or "bf16" (mixed with
            bfloat16, which has float32's range); several lanes separated by commas, of which the fastest with
            an error within the tolerance is chosen; or "auto", which is "fp32,amp". A lower precision is
            allowed, not required: where the FP32 program is faster, or no lower precision can be verified, it
            answers, and the report gives the reason.
        tolerance: largest relative error against float64, ‖y - ref‖ / ‖ref‖, for each output. None: a small
            multiple of eager's own error in the same precision, and at most 1e-2 for a lane that "auto"
            chooses; or at most twice the error that the model itself has where the process lets it round to
            TF32, as PyTorch's default lets convolutions on a GPU, up to 0.2. Where `topk` and its like take
            other places that are as good, the error is against the model that takes the same. With a
            tolerance, it is against the model's own choices, and FP32 may also use TF32 within it.
        metric: your own distance instead, `metric(outputs, original_outputs) -> float`, 0 or more; at most
            `tolerance` (None: 0) is accepted.
        budget_s: time limit in seconds for everything, including capture and verification. The search ends
            earlier if nothing likely to gain is left. Passes that do not fit are reported as not tried, with
            the budget that they need; another call goes on from there. If no pass could be judged, the
            original answers. None: 60 s, or what 600 calls of the model take if that is more, and at most
            600 s; or six times as long as its capture takes, and at most 120 s.
        device: optimize a copy on this device; None: the device of the weights.
        outputs: "copy": each call returns new tensors; "static": with a CUDA graph, results are buffers that
            the next call overwrites (no memory is allocated, and the addresses stay the same).
        policy: how the dtypes of mixed precision are chosen: "amp" (autocast's own lists), "O1", "O2" (as
            apex), "half".
        amp_dtype: the dtype of "amp": torch.float16, or torch.bfloat16, which is "bf16"; None: as above.
        exclude: names of passes to leave out (`ampopt passes` lists them).
        cache: reuse the result of an earlier call for the same graph, shapes, device and libraries, and store
            the result of this one; a reused result is verified and timed again. `ampopt cache` shows the
            folder and clears it. Exported and compiled code is cached there in any case; AMPOPT_CACHE=""
            disables the cache.
        nan: how NaN and infinities in the inputs must propagate. "keep": an output element that is NaN or
            infinite in the original must be so in the result; more elements of the same output may become so,
            and the report then says it. "exact": no more elements may become so. "ignore": not verified.
        progress: show a progress line; None: if standard error is a terminal.
        strict: the result's `strict`: if only the original could answer a call (for example, a new shape
            beyond the limit of captures), raise StrictError instead of running the original, which may be too
            slow for a robot. If nothing is faster than the original, it answers all calls, the report says
            so, and nothing is raised.
        passes: the passes to try in place of `ampopt.PIPELINE`: a changed one, such as
            `ampopt.PIPELINE.before("channels-last", MyPass())`; a list of exactly those to try, by name or as
            instances; or that list as text, `"fold-conv-bn,degroup{least-gain=1.1}"`. `exclude` is applied to
            the result.
        io: the dtypes of floating-point inputs and outputs. "original": the model's own. "lane": the result
            takes and gives the dtype of the lane (`fast(x.half())` for "amp" on CUDA), also where an FP32
            program or the original answers, so that no call converts at its border what the program does not
            need. `precision` has to name one lane. Example inputs may be in either dtype; calls in another
            one than the lane's raise InputError. Integers, booleans and the model's state stay as they are.
        dynamic: ranges of sizes that one program is to answer, both ends included: {"batch": (1, 8)} for
            dimension 0 of every input, {"height": (224, 512), "width": (224, 512)} for dimensions 2 and 3 of
            every input with four, or {input: {dimension: (low, high)}}, with the parameter's name. The
            program is kept where it is right at the example's size, at all corners of the ranges and at some
            sizes within, and takes at most 1.1 times the static program's time at the example's size. Else
            each size gets a program of its own, as without this argument, and a note in the report gives the
            reason. It takes 30 % of the time budget.

    Returns:
        A module with the model's call and result structure; its `report` lists each decision with its
        reason. If the model cannot be captured as one graph, its largest capturable submodules are optimized.

    Raises:
        InputError: the arguments do not fit the model. Interrupted: Ctrl-C was pressed while the model
        was prepared; later Ctrl-C ends the search, and the best result so far is returned. If no lane passes
        verification, nothing is raised: the original answers, and the report says why.
    """
    started = time.perf_counter()
    with interruptible():
        options = Options(
            precision=precision,
            tolerance=tolerance,
            metric=metric,
            outputs=outputs,
            policy=policy,
            amp_dtype=amp_dtype,
            exclude=exclude,
            cache=cache,
            nan=nan,
            passes=passes,
            io=io,
            dynamic=dynamic,
        ).within(budget_s)
        progress, strict = progress_flag(progress), flag("strict", strict)
        refuse_more(more)
        given = {} if example_kwargs is None else example_kwargs
        sandbox = Sandbox(target_of(model, example_inputs, given, device))
    with sandbox, contextlib.ExitStack() as threads:
        with interruptible():
            if _rehearses(options):
                sandbox.prepare()  # it loads its libraries during the first call and the capture
                if sandbox.device.type == "cuda":
                    bind_ahead()
            try:
                original, args, kwargs, note = prepare_call(model, example_inputs, given, device, options)
            except UncopyableError as error:
                return _served_itself(model, example_inputs, given, device, options, error, started)
            call_s = _seconds_of_a_slow_call(original, args, kwargs, options, started)
            busy = None
            if call_s is not None and call_s < Budget(started, options.budget_s).left_s:  # it was measured
                again = functools.partial(seconds_of_a_call, original, args, kwargs, options.budget_s)
                waiting = fewer_threads_if_they_wait(call_s, sandbox.device, again)
                call_s, busy = threads.enter_context(waiting)
            options = options.with_time_for(call_s or 0.0)
        where = sandbox.device
        with progress_line(progress, started, options.budget_s) as tell:
            result, options = _optimize(original, args, kwargs, options, started, tell, sandbox, call_s)
    result.strict = strict
    notes = busy, note, mode_note(model, original), io_note(original), _budget_note(options, call_s)
    result.report.notes[:0] = [told for told in notes if told]
    release(where)  # of what was tried and lost
    return result


def _served_itself(
    model: nn.Module,
    example_inputs: Any,
    given: Mapping[str, Any],
    device: torch.device | str | None,
    options: Options,
    error: UncopyableError,
    started: float,
) -> PartlyOptimizedModule:
    """The user's model under the interface of an optimized module, for what cannot be copied.

    Raises the error, with what can be done, where it would have to be changed: it is in training mode, or on
    another device, or takes and gives other dtypes.
    """
    model, args, note, target = checked_call(model, example_inputs, given, device)
    if any(map(is_training, model.modules())):
        raise UncopyableError(f"{error}; after model.eval() it is served as it is") from error
    if target != device_of(model, flatten_call(args, given)[0]) or options.io_dtype(target) is not None:
        raise error
    served = as_it_was(model, args, given, str(error), started=started, is_copy=False)
    served.report.notes[:0] = [note] if note else []
    return served


def _optimize(
    original: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    started: float,
    tell: ProgressLine,
    sandbox: Sandbox,
    call_s: float | None,
) -> tuple[OptimizedModule | PartlyOptimizedModule, Options]:
    """The result, and the options with the time that it was given."""
    with interruptible():
        reason = None if call_s is None else _why_nothing_fits(original, call_s, options, started)
        if reason is not None:
            return as_it_was(original, args, kwargs, reason, started=started), options
        began = time.perf_counter()
        try:
            captured = capture(original, args, kwargs, sandbox.device)
        except CaptureError as error:
            check_interrupted(error)
            reason = not_a_graph(error)
            if isinstance(error, LackError) and not isinstance(error, TooLargeError):
                return as_it_was(original, args, kwargs, reason, started=started), options
        options = options.with_time_for(call_s or 0.0, time.perf_counter() - began)
        tell.budget_s = options.budget_s
        if reason is None:
            optimizer = Optimizer(
                original,
                captured,
                options,
                name=type(original_of(original)).__name__,
                started=started,
                progress=tell,
                sandbox=sandbox,
                call_s=call_s,
            )
            if optimizer.is_tuned:
                sandbox.close()
    if reason is None:
        return optimizer.run(), options
    parts = PartwiseOptimizer(
        original, args, kwargs, options, reason, started=started, progress=tell, sandbox=sandbox
    )
    result = parts.run()
    if options.dynamic is not None:
        result.report.notes.append(f"{argument('dynamic=')} has no effect on a model that is not one graph")
    return result, options


def _rehearses(options: Options) -> bool:
    return any(engine.risky for engine in options.pipeline().engines) and options.budget_s >= WORTH_A_STAGE_S


CALLS_FOR_ONE_PASS = (
    CALLS_TO_LOOK + CALLS_TO_CAPTURE + calls_to_verify(draws=0) + CALLS_OF_A_TRIAL + WHOLE.calls
)
"""Number of calls in which one pass can be judged."""


def _seconds_of_a_slow_call(
    original: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, started: float
) -> float | None:
    """Seconds of a call, where it may be too slow for the budget; None where it certainly is not.

    All that was done until now, the first call included, takes at least as long as a call does.
    """
    calls = CALLS_FOR_ONE_PASS if options.is_budget_given else DEFAULT_CALLS
    elapsed, left = time.perf_counter() - started, Budget(started, options.budget_s).left_s
    if _exporting_s(original) + calls * elapsed <= left:
        return None
    if elapsed >= left:
        return elapsed
    return seconds_of_a_call(original, args, kwargs, options.budget_s)


def _why_nothing_fits(original: nn.Module, call_s: float, options: Options, started: float) -> str | None:
    needed_s = _exporting_s(original) + CALLS_FOR_ONE_PASS * call_s
    return Budget(started, options.budget_s).why_not(needed_s, call_s, "capturing and judging one pass")


def _exporting_s(original: nn.Module) -> float:
    return MODULE_S * sum(1 for _ in original.modules())


def _budget_note(options: Options, call_s: float | None) -> str | None:
    """A note for the report if the default budget is longer than usual."""
    if options.is_budget_given or round(options.budget_s) <= DEFAULT_S:
        return None
    is_slow = call_s is not None and options.budget_s <= default_budget_s(call_s)
    why = f"a call takes {call_s:.2g} s here" if is_slow else "its capture took long"
    return f"the time budget was {options.budget_s:.0f} s, because {why}: {argument('budget_s')} sets another"


def io_note(original: nn.Module) -> str | None:
    """A note for the report if the result takes and gives other dtypes than the model."""
    if not isinstance(original, LaneIO):
        return None
    name, asked = str(original.dtype).removeprefix("torch."), argument("io", "lane")
    return f'{asked}: it takes and gives {name}; "{CALLED_NOW}" is the original in its own dtypes'
