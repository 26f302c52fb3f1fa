"""`ampopt.optimize`: a model in, a faster verified one out."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.capture import capture
from ampopt.cuda_graphs import Outputs
from ampopt.errors import CaptureError, InputError
from ampopt.infer import infer_inputs
from ampopt.model_copy import device_of, private_copy, untouched_rng, working_copy
from ampopt.optimizer import Optimizer, Options
from ampopt.pass_manager import Progress
from ampopt.passes import ENGINES
from ampopt.process_state import process_kept
from ampopt.program import autocast_scope
from ampopt.progress import progress_line
from ampopt.regions import PartlyOptimizedModule, optimize_regions
from ampopt.rehearsal import Stage
from ampopt.runtime import OptimizedModule
from ampopt.signature import flatten_call
from ampopt.turns import optimizing
from ampopt.verify import Metric

WORTH_A_STAGE_S = 20.0
"""From this time budget on, a GPU's process for rehearsals is begun at once: it will probably be needed."""


@optimizing.taken()
@process_kept()
def optimize(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str = "auto",
    tolerance: float | None = None,
    metric: Metric | None = None,
    budget_s: float = 60.0,
    device: torch.device | str | None = None,
    outputs: Outputs = "copy",
    policy: str = "amp",
    amp_dtype: torch.dtype | None = None,
    exclude: Sequence[str] = (),
    cache: bool = True,
    progress: bool | None = None,
    strict: bool = False,
) -> OptimizedModule | PartlyOptimizedModule:
    """Make a model faster for inference, and prove it.

    Every pass is applied, verified against `model` in float64 and timed before and after, in FP32 and in
    mixed precision; only what is right and really helps is kept. `model` itself is never changed, and nothing
    of the process is. A call waits for one that goes on in another thread: both would mistime what they try.

    Args:
        model: any module; it is optimized as it is in evaluation mode.
        example_inputs: a tuple of the model's positional arguments, or the only argument (a tensor, a list,
            a dict). None: inferred from the first layer where that is possible.
        example_kwargs: the keyword arguments of the example call.
        precision: "fp32", "amp" (mixed), or "auto": the fastest whose error is within the tolerance.
        tolerance: largest relative error against float64, ‖y - ref‖ / ‖ref‖, for each output. None: a small
            multiple of eager's own error in the same precision, and at most 1e-2 for "auto" to choose it.
            With a tolerance, FP32 may also use TF32 where the error stays within it.
        metric: your own distance instead, `metric(outputs, original_outputs) -> float`; at most `tolerance`
            (None: 0) is accepted.
        budget_s: seconds for everything; what does not fit is reported as not tried.
        device: optimize a copy on this device; None: where the weights are.
        outputs: "copy": results are the caller's own; "static": with a CUDA graph, results are buffers that
            the next call overwrites (no memory is allocated, and the addresses stay).
        policy: how mixed precision is decided: "amp" (autocast's own lists), "O1", "O2" (as apex), "half".
        amp_dtype: torch.float16 or torch.bfloat16; None: float16 on CUDA, bfloat16 on a CPU.
        exclude: names of passes to leave out (`ampopt passes` lists them).
        cache: use what an earlier call found for the same graph, shapes, device and libraries, and keep what
            this one finds; it is verified and timed anew. `ampopt cache` tells where, and clears it. Exported
            and compiled code is kept there in any case; AMPOPT_CACHE="" keeps nothing.
        progress: show a progress line; None: where the standard error is a terminal.
        strict: the result's `strict`: where only the original could answer a call (a shape that no program
            can be made for any more), raise StrictError in place of serving the original, which may take too
            long on a robot. Where nothing is faster than the original and it answers all calls, as the report
            says, that is as planned and raises nothing.

    Returns:
        A module with the model's call and result structure; its `report` says what was done and why. Where
        the model cannot be captured as one graph, its largest capturable submodules are optimized.

    Raises:
        InputError: the arguments do not fit the model. VerificationError: interrupted before anything was
        tried. Where no lane verifies, nothing is raised: the original answers, and the report says why.
    """
    started = time.perf_counter()
    options = Options(
        precision, tolerance, metric, budget_s, outputs, policy, amp_dtype, tuple(exclude), cache
    )
    original, args, kwargs, note = prepare_call(model, example_inputs, example_kwargs or {}, device)
    where = device_of(original, flatten_call(args, kwargs)[0])
    with progress_line(progress, started, budget_s) as tell, Stage(where) as stage:
        result = _optimize(original, args, kwargs, options, started, tell, stage)
    result.strict = strict
    result.report.notes[:0] = [told for told in (note, mode_note(model)) if told]
    if where.type == "cuda":  # what was tried and lost lies in cycles and in PyTorch's cache
        gc.collect()
        torch.cuda.empty_cache()
    return result


def _optimize(
    original: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    started: float,
    tell: Progress,
    stage: Stage,
) -> OptimizedModule | PartlyOptimizedModule:
    name = type(original).__name__
    rehearses = any(step.risky for step in options.allowed(ENGINES)) and options.budget_s >= WORTH_A_STAGE_S
    try:
        captured = capture(original, args, kwargs, stage.device)
    except CaptureError as error:
        if rehearses:
            stage.prepare()
        return optimize_regions(
            original,
            args,
            kwargs,
            options,
            str(error),
            started=started,
            progress=tell,
            stage=stage,
        )
    optimizer = Optimizer(original, captured, options, name=name, started=started, progress=tell, stage=stage)
    if rehearses and not optimizer.is_tuned:
        stage.prepare()
    return optimizer.run()


def mode_note(model: nn.Module) -> str | None:
    """What is to be said of a model that is not, or not as a whole, in evaluation mode."""
    modes = [module.training for module in model.modules()]
    if not any(modes):
        return None
    which = "the model is" if all(modes) else f"{sum(modes)} of the model's {len(modes)} modules are"
    return f"{which} in training mode: what was measured and optimized is evaluation mode"


def prepare_call(
    model: nn.Module, example_inputs: Any, kwargs: Mapping[str, Any], device: torch.device | str | None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], str | None]:
    """A private copy of the model and the example call, both on the device; a note where it was inferred.

    The copy is not called, here or later: further copies of it are.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"optimize takes a torch.nn.Module, not {type(model).__name__}")
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    if example_inputs is None:
        args = ()
    try:
        target = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device={device!r} is no device: choose 'cpu' or 'cuda'") from error
    target = target or device_of(model, flatten_call(args, kwargs)[0])
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError("there is no CUDA device on this machine: leave device= out, or use 'cpu'")
        target = torch.device(
            "cuda", target.index if target.index is not None else torch.cuda.current_device()
        )
    original = private_copy(model, target)
    note = None
    if example_inputs is None and not kwargs:
        args, note = infer_inputs(original, target)
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.detach().to(target).clone() if isinstance(leaf, Tensor) else leaf,
        (args, dict(kwargs)),
    )
    try:
        with torch.no_grad(), untouched_rng(target), autocast_scope(target, None):
            working_copy(original)(*args, **kwargs)
    except Exception as error:
        raise InputError(f"{type(model).__name__} fails on the example inputs: {error}") from error
    return original, args, dict(kwargs), note
