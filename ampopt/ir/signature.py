"""Converts between a model's call, with nested arguments and results, and flat lists of tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.utils import _pytree as pytree

from ampopt.errors import InputError


def tensor_key(tensor: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...], torch.device]:
    """The properties of a tensor that a captured program depends on: shape, dtype, strides, device."""
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


def recognizer(*examples: Tensor) -> Callable[..., bool]:
    """A fast C++ check whether as many objects are tensors that differ from `examples` in values alone.

    Each must have the same class, `tensor_key`, and negative and conjugate bits, in a thread with the present
    modes (inference, autocast): under other modes the check always fails. It fails if one comes twice, too.
    """
    guards = TensorGuards(
        *examples,
        dynamic_dims_sizes=None,
        dynamic_dims_strides=None,
    )
    same: Callable[..., bool] = guards.check
    return same


def describe(tensor: Tensor) -> str:
    """A short description of a tensor: `float32[1, 3, 480, 640] on cpu`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


MOST_SHOWN = 80
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """What an argument is told by: a tensor or an array by its dtype and shape, any other by its value."""
    if isinstance(value, Tensor):
        return describe(value)
    if isinstance(value, np.ndarray):
        return f"array of NumPy, {value.dtype}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


def shown_all(leaves: Sequence[object]) -> str:
    """What a call is told by: its tensors, and its numbers and words, each of which has a program."""
    return ", ".join(map(shown, leaves)) or "no tensors"


@dataclasses.dataclass(frozen=True)
class CallKey:
    """The signature of a call: its structure, every tensor's `tensor_key`, every other argument's value.

    A tensor's class counts, too, and which arguments are the same tensor or container. `leaves` may omit
    strides, for programs that do not depend on them.
    """

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]

    def __hash__(self) -> int:
        return hash(self.leaves)


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a call in order, and its structure; keyword arguments and dicts keep their order.

    The structure tells where a list, dict, deque or dataclass is given that was given before (`a is b`);
    a call that is built of it has separate ones there.
    """
    call = (tuple(args), kwargs if type(kwargs) is dict else dict(kwargs))
    if all(isinstance(value, _NO_CONTAINERS) for value in (*call[0], *call[1].values())):
        return pytree.tree_flatten(call)
    seen, again = (
        dict[int, object](),
        False,
    )  # kept: what a flattening makes for itself would lose its address

    def look(value: object) -> bool:
        nonlocal again
        if isinstance(value, _SHARED) or dataclasses.is_dataclass(value):
            again |= id(value) in seen
            seen[id(value)] = value
        return False

    leaves, spec = pytree.tree_flatten(call, is_leaf=look)
    if again:
        with contextlib.suppress(Exception):  # of a class that is built of nothing but what it knows
            return pytree.tree_flatten(_marked(call, {}))
    return leaves, spec


_NO_CONTAINERS = (Tensor, int, float, str, type(None))
"""Arguments that hold no others."""

_SHARED = (list, dict, deque)
"""Containers, beside dataclasses, whose identity counts: equal tuples are often one object by chance."""


class _Again:
    """A container that a call has given before, at another place."""

    def __init__(self, container: Any) -> None:
        self.container = container


@functools.cache
def _again() -> type[_Again]:
    """The class, which pytree knows from now on; a structure with it builds the bare container."""
    pytree.register_pytree_node(_Again, lambda a: ([a.container], None), lambda parts, _: next(iter(parts)))
    return _Again


def _marked(value: Any, seen: dict[int, object]) -> Any:
    """A nested value with what comes again, in the order of its leaves, marked as such."""
    parts, spec = one_level(value)
    if spec.is_leaf():
        return value
    is_again = id(value) in seen
    if isinstance(value, _SHARED) or dataclasses.is_dataclass(value):
        seen[id(value)] = value
    found = pytree.tree_unflatten([_marked(part, seen) for part in parts], spec)
    return _again()(found) if is_again else found


def one_level(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """What a container holds, and how it is built of that; of a leaf itself alone."""
    return pytree.tree_flatten(value, is_leaf=lambda part: part is not value)


def map_tensors(
    function: Callable[[Tensor], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with `function` of every tensor; a tensor or container that is given twice stays one."""
    made: dict[int, tuple[Any, Any]] = {}  # what it was, which keeps its address, and what it is

    def mapped(value: Any) -> Any:
        if id(value) in made:
            return made[id(value)][1]
        parts, spec = one_level(value)
        if not spec.is_leaf():
            made[id(value)] = value, pytree.tree_unflatten([mapped(part) for part in parts], spec)
        elif isinstance(value, Tensor):
            made[id(value)] = value, function(value)
        else:
            return value
        return made[id(value)][1]

    return mapped(tuple(args)), mapped(dict(kwargs))


def copied(tensor: Tensor) -> Tensor:
    """A tensor of its own, without gradients."""
    return tensor.detach().clone()


def exactly_copied(tensor: Tensor) -> Tensor:
    """`copied`, also with the strides of a tensor that has gaps in memory, or elements that overlap."""
    own = copied(tensor)
    if own.layout is not torch.strided or own.stride() == tensor.stride() or not own.numel():
        return own
    if tensor.is_conj() or tensor.is_neg():
        return own
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = copied(tensor.detach().as_strided((span,), (1,), tensor.storage_offset()))
    return memory.as_strided(tensor.shape, tensor.stride())


def own_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`exactly_copied` for each of a call's tensors; one that is given twice stays one.

    Copies of views of one another do not share memory.
    """
    copies: dict[int, Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in copies:
            copies[id(tensor)] = exactly_copied(tensor)
    return [copies[id(tensor)] for tensor in tensors]


def without_repetitions(tensor: Tensor) -> Tensor:
    """A view of a tensor without the dimensions along which it repeats one place in memory, if expanded."""
    if tensor.layout is torch.strided and tensor.numel():
        for dim, stride in reversed([*enumerate(tensor.stride())]):
            tensor = tensor.select(dim, 0) if stride == 0 else tensor
    return tensor


def call_key(leaves: Sequence[Any], spec: pytree.TreeSpec, *, strides: bool = True) -> CallKey:
    """The key of a call's leaves; unhashable values are represented by their type and identity."""
    parts: list[object] = []
    tensors: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(id(leaf))
            parts.append(tensor_key(leaf) if strides else (leaf.shape, leaf.dtype, leaf.device))
            if leaf.__class__ is not Tensor:
                parts.append(leaf.__class__)
            continue
        if isinstance(leaf, (float, complex)):
            parts.append((type(leaf), repr(leaf)))  # 0.0 is not -0.0, and NaN is itself
            continue
        try:
            hash(leaf)
            parts.append((type(leaf), leaf))
        except TypeError:
            parts.append((type(leaf), id(leaf)))
    if len(tensors) > 1 and len(set(tensors)) < len(tensors):
        parts.append(tuple([tensors.index(tensor) for tensor in tensors]))  # where each of them is first
    return CallKey(spec, tuple(parts))


def tensors_of(leaves: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors among a call's leaves, in order."""
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


@dataclasses.dataclass(frozen=True)
class OutputLayout:
    """Converts flat output tensors to the model's nested result.

    `template` holds every leaf of the result: constants from the capture, and `OutputLayout.TENSOR` for each
    flat tensor.
    """

    TENSOR = object()

    spec: pytree.TreeSpec
    template: tuple[object, ...]

    @functools.cached_property
    def restore(self) -> Callable[[Sequence[Tensor]], Any]:
        """Builds the model's nested result from flat outputs, with fast paths for common structures."""
        count = len(self.template)
        if any(leaf is not OutputLayout.TENSOR for leaf in self.template):
            return self._restore
        built = pytree.tree_unflatten(list(range(count)), self.spec)
        if type(built) is int:
            return operator.itemgetter(0)
        kind: type[Any] = type(built)
        if kind in (tuple, list) and list(built) == list(range(count)):
            return kind
        if kind in (dict, OrderedDict) and list(built.values()) == list(range(count)):
            return lambda tensors: kind(zip(built, tensors, strict=True))
        return self._restore

    def _restore(self, tensors: Sequence[Tensor]) -> Any:
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is OutputLayout.TENSOR else leaf for leaf in self.template]
        return pytree.tree_unflatten(leaves, self.spec)

    def __deepcopy__(self, memo: object) -> OutputLayout:
        return self  # immutable, and TENSOR is known by identity

    def __reduce__(self) -> tuple[Any, ...]:
        marks = tuple(leaf is OutputLayout.TENSOR for leaf in self.template)
        constants = tuple(None if mark else leaf for mark, leaf in zip(marks, self.template, strict=True))
        return _layout, (self.spec, marks, constants)


def _layout(spec: pytree.TreeSpec, marks: Sequence[bool], constants: Sequence[object]) -> OutputLayout:
    leaves = zip(marks, constants, strict=True)
    return OutputLayout(spec, tuple(OutputLayout.TENSOR if mark else value for mark, value in leaves))


def flatten_outputs(result: Any) -> tuple[list[Tensor], OutputLayout]:
    """The tensors of a model's result, in order, and the layout that rebuilds the result."""
    leaves, spec = pytree.tree_flatten(result, is_leaf=lambda value: isinstance(value, torch.Size))
    template = tuple(OutputLayout.TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return list(tensors_of(leaves)), OutputLayout(spec, template)


def check_same_call(expected: Sequence[Any], actual: Sequence[Any], device: torch.device) -> None:
    """Raise InputError if a call's tensors are on another device, or have other dtypes than a program's.

    `expected` are the leaves of the program's own call, or none where the structure of this one is another.
    Dtypes are compared where both have a tensor: what has become one, or is none any more, makes another
    call.
    """
    index = 0
    for want, got in zip(expected or (None,) * len(actual), actual, strict=True):
        if not isinstance(got, Tensor):
            continue
        dtype = want.dtype if isinstance(want, Tensor) else got.dtype
        if got.dtype != dtype or got.device != device:
            raise InputError(
                f"tensor {index} of the call is {describe(got)}; this program was made for "
                f"{str(dtype).removeprefix('torch.')} on {device}: convert it with "
                f".to(device={str(device)!r}, dtype={dtype})"
            )
        index += 1
