"""Checks user arguments; an invalid argument raises an error that says what to write instead."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from ampopt.errors import InputError, near
from ampopt.system.wording import argument


def number(name: str, value: object, *, positive: bool, advice: str) -> float:
    """A finite real number, positive or at least 0, as a float; NumPy numbers are accepted."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number:
        found = float(value)  # type: ignore[arg-type]
        if math.isfinite(found) and (found > 0 if positive else found >= 0):
            return found
    raise InputError(f"{argument(name, value)}: give {advice}")


def flag(name: str, value: object) -> bool:
    """True or False; NumPy booleans are accepted."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise InputError(f"{argument(name, value)}: give True or False")


def progress_flag(value: object) -> bool | None:
    """Whether progress is shown; None: if standard error is a terminal."""
    return None if value is None else flag("progress", value)


def names(name: str, value: object, known: Collection[str]) -> tuple[str, ...]:
    """Names of passes. Raises InputError for an unknown name, and for a single string."""
    if isinstance(value, str):
        raise InputError(f"{argument(name, value)}: give a list of names, {argument(name, [value])}")
    if not isinstance(value, Collection) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{argument(name, value)}: give a list of the names of passes")
    if unknown := sorted(set(value) - set(known)):
        choices = f"{', '.join(sorted(known))}{near(unknown, sorted(known))}"
        raise InputError(f"there is no pass {', '.join(unknown)}: choose from {choices}")
    return tuple(value)


def one_of(name: str, value: object, choices: Collection[str]) -> None:
    """Raise InputError if a word is not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{argument(name, value)}: choose from {', '.join(choices)}")


def as_device(device: object) -> torch.device | None:
    """The user's device, or None if none is given. Raises InputError if this machine does not have it."""
    if device is None:
        return None
    try:
        if isinstance(device, bool):
            raise TypeError("a bool")
        found = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{argument('device', device)} is no device: choose 'cpu' or 'cuda'") from error
    if found.type == "meta":
        raise InputError(f"{argument('device', 'meta')} computes nothing: choose 'cpu' or 'cuda'")
    return found  # type: ignore[no-any-return]


def as_cuda(target: torch.device) -> torch.device:
    """A CUDA device with its index. Raises InputError if this machine does not have it."""
    if not torch.cuda.is_available():
        raise InputError(
            f"there is no CUDA device on this machine: leave {argument('device=')} out, or use 'cpu'"
        )
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        raise InputError(f"there is no {target}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def as_tensors_say(target: torch.device) -> torch.device:
    """A device as its tensors name it: "cpu:0" is "cpu". Raises InputError where there is no such one."""
    try:
        return torch.empty(0, device=target).device
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise InputError(f"this machine has no {target}: choose 'cpu' or 'cuda'") from error


def refuse_more(more: tuple[Any, ...]) -> None:
    """Raise InputError if example inputs were passed as separate arguments."""
    if more:
        raise InputError(
            f"{1 + len(more)} example inputs were given one by one: pass the arguments as one tuple, (a, b), "
            "and those with keywords as example_kwargs={...}"
        )


def as_call(example_inputs: Any, kwargs: object) -> tuple[Any, ...]:
    """The positional arguments of the example call. Raises InputError for invalid keyword arguments."""
    if not isinstance(kwargs, Mapping):
        raise InputError(f"example_kwargs takes a dict of keyword arguments, not a {type(kwargs).__name__}")
    if strange := [key for key in kwargs if not isinstance(key, str)]:
        raise InputError(f"example_kwargs has the key {strange[0]!r}: its keys are names of arguments")
    if example_inputs is None:
        return ()
    return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)


def check_example(leaf: object) -> None:
    """Raise InputError for an example tensor without its own data, or with rows of several lengths."""
    if not isinstance(leaf, Tensor):
        return
    if leaf.is_nested:
        raise InputError(
            "an example input is a nested tensor, whose rows have lengths of their own: no program has fixed "
            "sizes for it; pass one padded to the longest row, x.to_padded_tensor(0.0)"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(leaf):
        raise InputError("an example input belongs to a torch.func transform: call optimize outside of it")
    if leaf.is_meta or isinstance(leaf, FakeTensor):
        raise InputError(
            f"an example input ({list(leaf.shape)}) is a {_kind(leaf)} tensor without numbers: "
            f"pass a real one, torch.randn({', '.join(map(str, leaf.shape))})"
        )


def as_module(model: object) -> tuple[nn.Module, str | None]:
    """The module to optimize, without training wrappers, and a note if there was one.

    An exported program is the module that it makes. Raises InputError if it is not a module, or if its
    weights are not initialized.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(f"{model.__name__} is a class: pass an instance, {model.__name__}(...)")
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module()
    if not isinstance(model, nn.Module):
        raise InputError(f"optimize takes a torch.nn.Module, not {type(model).__name__}")
    note = None
    while (inside := _wrapped(model)) is not None:
        note = f"the module inside the {type(model).__name__} was optimized: the result does without that"
        model = inside
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"{name} of the model has no shape yet, because its layer is lazy: call the model once, "
                "model(example), before it is optimized"
            )
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            raise InputError(
                f"{name} of the model is a {_kind(tensor)} tensor without numbers: give it some, "
                "model.to_empty(device='cpu') and then load_state_dict, or load_state_dict(..., assign=True)"
            )
    return model, note


def _wrapped(model: nn.Module) -> nn.Module | None:
    """The module inside a data-parallel or compiled one, which calls it and nothing else."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inside: nn.Module = model.module
        return inside
    if type(model).__module__ == "torch._dynamo.eval_frame" and isinstance(model._orig_mod, nn.Module):
        return model._orig_mod  # dynamo's class by its name: asking dynamo for it loads the compiler
    return None


def _kind(tensor: Tensor) -> str:
    return "fake" if isinstance(tensor, FakeTensor) else "meta"


def advice_on_failure(args: tuple[Any, ...]) -> str:
    """A hint how to pass example inputs that a model rejects; "" if there is none."""
    if args and all(isinstance(size, int) for size in args):
        return f" (a shape is no example: pass torch.randn({', '.join(map(str, args))}))"
    if len(args) == 1 and isinstance(args[0], list):
        return " (a list is one argument: several go into a tuple, (a, b))"
    if any(type(arg).__module__ == "numpy" for arg in args):
        return " (an example is a NumPy array: pass torch.from_numpy(array))"
    return ""
