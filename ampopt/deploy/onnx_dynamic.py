"""Captures a model with symbolic sizes, for ONNX files whose inputs have dynamic dimensions."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.engines.onnx_graph import Dims
from ampopt.errors import CaptureError, ExportError, InputError
from ampopt.ir.capture import Captured
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.ir.signature import map_tensors
from ampopt.ir.size_range import Sizes
from ampopt.ir.size_ranges import with_tensors
from ampopt.ir.symbolic_capture import capture_ranges, capture_symbolic
from ampopt.system.interrupts import check_interrupted
from ampopt.system.wording import argument

Dynamic = str | Mapping[str, Mapping[int, str]] | None
"""None: static shapes; "batch": dimension 0 of every input; or {input: {dimension: name}}."""


def dims_of(dynamic: Dynamic, captured: Captured, names: Sequence[str]) -> Dims:
    """A user's `dynamic` in full form. Raises InputError for unknown inputs and dimensions."""
    examples = dict(zip(names, captured.program.examples, strict=True))
    if dynamic is None:
        return tuple({} for _ in names)
    if captured.lifted is not None:
        raise InputError(
            f"{argument('dynamic')}: the model keeps a state in its {captured.lifted.named}, "
            "whose sizes are fixed: export it with static shapes"
        )
    if isinstance(dynamic, str):
        if dynamic != "batch":
            raise InputError(
                f'{argument("dynamic", dynamic)}: say "batch", or {{input: {{dimension: name}}}}'
            )
        return tuple({0: "batch"} if tensor.dim() else {} for tensor in examples.values())
    for name, dims in dynamic.items():
        if name not in examples:
            raise InputError(
                f"{argument('dynamic')}: there is no input {name!r}; the inputs are {', '.join(names)}"
            )
        for index, label in dims.items():
            if not 0 <= index < examples[name].dim() or not label.isidentifier():
                raise InputError(
                    f"{argument('dynamic')}: {{{index}: {label!r}}} of input {name!r}, which has shape "
                    f"{list(examples[name].shape)}: name a dimension of it with an identifier"
                )
    return tuple(dict(dynamic.get(name, {})) for name in names)


def capture_dynamic(model: nn.Module, captured: Captured, dims: Dims, sizes: Sizes = ()) -> Captured:
    """Capture a private copy of a model with symbolic `dims`; example sizes of 1 become 2 there.

    `torch.export` makes a size of 1 a constant. `sizes`: the ranges that hold, else any size does. Raises
    ExportError with its reason if the model fixes a dimension that should be dynamic.
    """
    try:
        if sizes:
            return capture_ranges(model, captured, sizes)
        symbols = [dict.fromkeys(named, torch.export.Dim.DYNAMIC) for named in dims]
        return capture_symbolic(model, captured, _resized(captured, dims, lambda size: max(size, 2)), symbols)
    except Exception as error:
        raise refusal(model, dims, error) from error


def refusal(model: nn.Module, dims: Dims, error: Exception) -> ExportError:
    """The error for a model that cannot be exported with dynamic dimensions."""
    names = ", ".join(dict.fromkeys(name for named in dims for name in named.values()))
    reason = str(error) if isinstance(error, CaptureError) else str(error) or type(error).__name__
    short = textwrap.shorten(reason, 300, placeholder=" …")
    return ExportError(
        f"{type(model).__name__} cannot be exported with dynamic {names}: {short}; "
        "export it with static shapes, one file for each size"
    )


def doubled(captured: Captured, dims: Dims) -> Captured:
    """The captured call with every dynamic dimension twice as large."""
    return _with(captured, _resized(captured, dims, lambda size: 2 * size))


def one_more(model: nn.Module, captured: Captured, dims: Dims) -> Captured | None:
    """The captured call with every dynamic dimension larger by 1, or 3 for 1; None where the model refuses.

    Example sizes are multiples of many numbers, at which a wrong rule for sizes may hold. The model is a
    private copy.
    """
    resized = _resized(captured, dims, lambda size: size + 1 if size != 1 else 3)
    return _if_taken(model, _with(captured, resized))


def ones(model: nn.Module, captured: Captured, dims: Dims) -> list[Captured]:
    """The captured call with each dynamic dimension alone of size 1, where the model takes that.

    `torch.export` takes all sizes for others than 1: what a model does there alone, no capture has.
    Dimensions of one name have one size. The model is a private copy.
    """
    made = list[Captured]()
    for name in dict.fromkeys(name for named in dims for name in named.values()):
        of_name = tuple({i: each for i, each in named.items() if each == name} for named in dims)
        given = zip(captured.program.examples, of_name, strict=True)
        if any(tensor.shape[index] > 1 for tensor, named in given for index in named):
            made.append(_with(captured, _resized(captured, of_name, lambda _: 1)))
    return [each for each in made if _if_taken(model, each) is not None]


def _if_taken(model: nn.Module, made: Captured) -> Captured | None:
    """A call; None where a private copy of the model refuses it."""
    args, kwargs = map_tensors(torch.clone, *pytree.tree_unflatten(list(made.leaves), made.spec))
    try:
        with torch.no_grad(), untouched_rng(made.program.device):
            working_copy(model)(*args, **kwargs)
    except Exception as error:
        check_interrupted(error)
        return None
    return made


def _with(captured: Captured, tensors: Sequence[Tensor]) -> Captured:
    leaves = with_tensors(captured.leaves, tensors)
    program = captured.program.replace(examples=tuple(tensors))
    return dataclasses.replace(captured, program=program, leaves=leaves)


def _resized(captured: Captured, dims: Dims, new: Callable[[int], int]) -> list[Tensor]:
    """The examples, repeated from the beginning to new sizes of their dynamic dimensions; none stays none."""
    resized = []
    for tensor, named in zip(captured.program.examples, dims, strict=True):
        for index in named:
            if size := tensor.shape[index]:
                rows = torch.arange(new(size), device=tensor.device) % size
                tensor = tensor.index_select(index, rows)
        resized.append(tensor.clone())  # one tensor given twice has to be two here
    return resized
