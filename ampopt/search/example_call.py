"""The user's model and example call: checked, and copied to the device for which the model is optimized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ampopt.deploy.inference_module import InferenceModule
from ampopt.errors import InputError, UncopyableError, says
from ampopt.ir.arguments import (
    advice_on_failure,
    as_call,
    as_cuda,
    as_device,
    as_module,
    as_tensors_say,
    check_example,
)
from ampopt.ir.copyable import check_copyable
from ampopt.ir.lane_io import LaneIO, original_of, with_own_dtypes
from ampopt.ir.model_copy import (
    device_of,
    exact_copy,
    is_training,
    note_writes,
    private_copy,
    untouched_rng,
)
from ampopt.ir.settings import autocast_scope
from ampopt.ir.signature import flatten_call, map_tensors
from ampopt.search.infer import infer_inputs
from ampopt.search.options import Options
from ampopt.system.interrupts import check_interrupted

GUARDS = "_guards_fn"
"""What the module of an exported program checks its inputs with."""


def target_of(
    model: nn.Module, example_inputs: Any, kwargs: Mapping[str, Any], device: torch.device | str | None
) -> torch.device:
    """The device that a model is optimized for. Raises InputError as `checked_call` does."""
    return checked_call(model, example_inputs, kwargs, device)[-1]


def checked_call(
    model: nn.Module, example_inputs: Any, kwargs: Mapping[str, Any], device: torch.device | str | None
) -> tuple[nn.Module, tuple[Any, ...], str | None, torch.device]:
    """The module and the example call as they were given, a note on the module, and the device.

    Raises InputError where they cannot be optimized, whatever they compute.
    """
    model, note = as_module(model)
    for name, module in model.named_modules():
        if isinstance(module, InferenceModule):
            which = f"submodule {name} of the model" if name else "the model"
            raise InputError(f"{which} is optimized already: pass the original")
    args = as_call(example_inputs, kwargs)
    leaves = flatten_call(args, kwargs)[0]
    for leaf in leaves:
        check_example(leaf)
    target = as_device(device) or device_of(model, leaves)
    return model, args, note, as_cuda(target) if target.type == "cuda" else as_tensors_say(target)


def prepare_call(
    model: nn.Module,
    example_inputs: Any,
    kwargs: Mapping[str, Any],
    device: torch.device | str | None,
    options: Options | None = None,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], str | None]:
    """A private copy of the model and the example call, on the device; a note if the call was inferred.

    The copy itself is never called; further copies of it are. With an `io_dtype` in the options, the copy is
    in a `LaneIO`, and the call is one of that.
    """
    model, args, note, target = checked_call(model, example_inputs, kwargs, device)
    check_copyable(model)
    original = private_copy(model, target)
    if example_inputs is None and not kwargs:
        args, inferred = infer_inputs(original, target)
        note = "; ".join(filter(None, (note, inferred)))

    dtype = None if options is None else options.io_dtype(target)

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().to(target).clone()

    try:
        with torch.inference_mode(mode=False), torch.no_grad():  # what is made in that mode stays so
            args, kwargs = map_tensors(own, args, kwargs)
            if dtype is not None:
                args, kwargs = with_own_dtypes(original, args, kwargs, dtype)
            with untouched_rng(target), autocast_scope(target, None):
                seen_args, seen_kwargs = map_tensors(own, args, kwargs)  # the model may write to them
                called = exact_copy(original)
                called(*seen_args, **seen_kwargs)
                note_writes(original, called)
    except (Exception, SystemExit) as error:
        check_interrupted(error)
        if _derives_by_its_weights(model, args, kwargs, target):
            raise UncopyableError(
                "the model derives by its own weights when it is called, and programs have weights without "
                "gradients"
            ) from error
        advice = advice_on_failure(args)
        raise InputError(
            f"{type(model).__name__} fails on the example inputs: {says(error)}{advice}"
        ) from error
    if dtype is not None:
        original = LaneIO.of_call(original, args, kwargs, dtype)
        args, kwargs = original.outside(args, kwargs)
    return original, args, dict(kwargs), note


def _derives_by_its_weights(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: torch.device
) -> bool:
    """Whether a call that fails with weights without gradients succeeds with those that the model has."""
    if not any(weight.requires_grad for weight in model.parameters()):
        return False
    try:
        with torch.inference_mode(mode=False), torch.no_grad(), untouched_rng(target):
            args, kwargs = map_tensors(lambda tensor: tensor.detach().to(target).clone(), args, kwargs)
            exact_copy(model).eval().to(target)(*args, **kwargs)
    except (Exception, SystemExit) as error:
        check_interrupted(error)
        return False
    return True


def _is_of_operators(model: nn.Module) -> bool:
    if not isinstance(model, fx.GraphModule):
        return False
    called = [node.target for node in model.graph.nodes if node.op == "call_module"]
    return all(name == GUARDS for name in called)


def mode_note(
    model: object, evaluated: nn.Module | None = None, did: str = "measured and optimized"
) -> str | None:
    """A note for the report if the model, or a part of it, is not in evaluation mode; `did`: what was done.

    `evaluated` is the copy of which it was done: there are modules that train in any mode. An exported
    program, and a graph of operators alone, have the mode in which they were made.
    """
    if not isinstance(model, nn.Module) or _is_of_operators(model):
        return None
    modes = [is_training(module) for module in model.modules()]
    if not any(modes):
        return None
    be = "is" if sum(modes) == 1 else "are"
    which = "the model is" if all(modes) else f"{sum(modes)} of the model's {len(modes)} modules {be}"
    return f"{which} in training mode: what was {did} is evaluation mode{_but_for(evaluated)}"


def _but_for(evaluated: nn.Module | None) -> str:
    """The modules of a model in evaluation mode that are in training mode all the same."""
    if evaluated is None:
        return ""
    modules = original_of(evaluated).named_modules()
    left = [f"{path or 'the model'} ({type(each).__name__})" for path, each in modules if is_training(each)]
    if not left:
        return ""
    more = f" and {len(left) - 1} more, which eval() leaves as they are"
    return f", but for {left[0]}{more if len(left) > 1 else ', which eval() leaves as it is'}"
