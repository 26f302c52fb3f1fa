"""Finds the operators that read or write a tensor at places which values decide, perhaps out of its range.

PyTorch raises an error there. Not every engine does: OpenVINO answers with zeros, with what lies beside the
tensor, or ends the process (2026.4), and so does a check in a loop that inductor made for several threads.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampopt.ir.aliasing import aliased_by
from ampopt.ir.graph import arguments, aten, calls, constant, dtype_of, gives_a_tensor, is_constant, shape_of

Range = tuple[int, int]
"""The least and the largest integer that a tensor may hold."""

_NAMES = ("index", "indices")
"""The names that PyTorch's operators give to tensors of places."""

_FROM_THE_END = (aten.index.Tensor, aten.index_put.default, aten.take.default, aten.put.default)
"""Operators that count negative places from the end."""

_PLACES: frozenset[object] = frozenset(
    {aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.topk.default}
    | {aten.sort.default, aten.sort.stable, aten.argsort.default}
)
"""Operators whose integers are places along a dimension of their input."""

_POOLINGS: dict[object, int] = {
    aten.max_pool2d_with_indices.default: 2,
    aten.adaptive_max_pool2d.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool3d.default: 3,
}
"""Operators whose integers are places in an image of their input, and its number of dimensions."""

_COPIES: frozenset[object] = frozenset(
    {aten.clone.default, aten.contiguous.default, aten.flip.default, aten.repeat.default, aten.roll.default}
)
"""Operators whose results are elements of their input; so are views and casts."""

_JOINED = (aten.cat.default, aten.stack.default)

_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)

_ARITHMETIC: dict[object, Callable[[int, int], int]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
}


def may_miss(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The operators that are given a place which may be out of range, after `shapes.record_shapes`."""
    known = dict[fx.Node, Range]()
    for node in calls(module):
        if isinstance(node.target, OpOverload) and any(_misses(module, node, known)):
            yield node


def _misses(module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Range]) -> Iterator[bool]:
    """For each tensor of places, whether one may be out of range."""
    given = arguments(node)
    for name in _NAMES:
        places = given.get(name)
        for number, each in enumerate(places if isinstance(places, Sequence) else [places]):
            if isinstance(each, fx.Node) and not dtype_of(each).is_floating_point and not _is_mask(each):
                size = _size(node.target, given, number)
                low, high = _range(module, each, known)
                yield high >= size or low < (-size if node.target in _FROM_THE_END else 0)


def _is_mask(node: fx.Node) -> bool:
    return dtype_of(node) is torch.bool


def _size(target: object, given: dict[str, Any], number: int) -> int:
    """How many places there are for the indices with this number; 0 where that is not known."""
    source = given.get("self", given.get("weight"))
    if not isinstance(source, fx.Node):
        return 0
    shape = shape_of(source)
    if target in (aten.take.default, aten.put.default):
        return math.prod(shape)
    if target in (aten.index.Tensor, aten.index_put.default):
        return shape[number]
    if target in (aten.max_unpool2d.default, aten.max_unpool3d.default):
        return math.prod(given["output_size"])
    if target is aten.embedding.default:
        return shape[0]
    dim = given.get("dim")
    return shape[dim] if isinstance(dim, int) and shape else 0


def _range(module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Range]) -> Range:
    """What the integers of a node may be: at the most what their dtype holds."""
    if node not in known:
        whole = _of_dtype(node)
        low, high = _computed(module, node, known) or whole
        known[node] = (low, high) if whole[0] <= low and high <= whole[1] else whole  # it would go around
    return known[node]


def _of_dtype(node: fx.Node) -> Range:
    dtype = dtype_of(node)
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _computed(module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Range]) -> Range | None:
    """The range of what a node computes; None where nothing is known of it."""
    if is_constant(node):
        value = constant(module, node)
        return (int(value.min()), int(value.max())) if value is not None and value.numel() else (0, 0)
    if node.op != "call_function":
        return None
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    if source.target in _PLACES:
        return 0, _length(source) - 1
    if source.target in _POOLINGS:
        return 0, math.prod(shape_of(source.all_input_nodes[0])[-_POOLINGS[source.target] :]) - 1
    if not isinstance(node.target, OpOverload):
        return None
    if (compute := _ARITHMETIC.get(node.target)) is not None:
        pair = [_operand(module, each, known) for each in node.args[:2]]
        if pair[0] is None or pair[1] is None or node.kwargs:
            return None
        ends = [compute(a, b) for a in pair[0] for b in pair[1]]
        return min(ends), max(ends)
    if node.target is aten.clamp.default:
        return _clamped(_operand(module, node.args[0], known), arguments(node))
    if node.target in _JOINED:
        ranges = [_operand(module, each, known) or _of_dtype(node) for each in node.all_input_nodes]
        return min(low for low, _ in ranges), max(high for _, high in ranges)
    if node.target in _COUNTS:
        return _counted(arguments(node))
    if node.target in _COPIES or _is_cast(node) or (aliased_by(node) and len(node.all_input_nodes) == 1):
        return _operand(module, node.args[0], known)
    return None


def _is_cast(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in (aten.to, aten._to_copy)


def _operand(module: fx.GraphModule, value: object, known: dict[fx.Node, Range]) -> Range | None:
    if isinstance(value, int):
        return value, value
    if not isinstance(value, fx.Node) or not gives_a_tensor(value) or dtype_of(value).is_floating_point:
        return None
    return _range(module, value, known)


def _clamped(before: Range | None, given: dict[str, Any]) -> Range | None:
    low, high = given["min"], given["max"]
    if before is None or not all(each is None or isinstance(each, int) for each in (low, high)):
        return None
    bound = [end if low is None else max(end, low) for end in before]
    first, last = (end if high is None else min(end, high) for end in bound)
    return first, last


def _counted(given: dict[str, Any]) -> Range | None:
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    is_whole = all(isinstance(each, int) for each in (start, end, step))
    return (start, end - 1) if is_whole and start < end and step > 0 else None


def _length(node: fx.Node) -> int:
    """The size of the dimension in which an operator finds places; of all dimensions, if it has none."""
    given = arguments(node)
    shape, dim = shape_of(given["self"]), given.get("dim")
    return math.prod(shape) if dim is None else shape[dim] if shape else 1
