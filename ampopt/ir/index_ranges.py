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

from ampopt.ir.graph import arguments, aten, constant, dtype_of, gives_a_tensor, is_constant, shape_of

Range = tuple[int, int]
"""The least and the largest integer that a tensor may hold."""

_NAMES = ("index", "indices")
"""The names that PyTorch's operators give to tensors of places."""

_INDEXED = (aten.index.Tensor, aten.index_put.default)
_FROM_THE_END = (*_INDEXED, aten.take.default, aten.put.default)
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

_ELEMENTS: frozenset[object] = frozenset(
    {aten.clone.default, aten.contiguous.default, aten.flip.default, aten.repeat.default, aten.roll.default}
    | {aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.view_as.default}
    | {
        aten.tile.default,
        aten.expand_as.default,
        aten.movedim.int,
        aten.movedim.intlist,
        aten.repeat_interleave.self_int,
    }
    | {aten.swapaxes.default, aten.swapdims.default, aten.meshgrid.default, aten.meshgrid.indexing}
    | {aten.cat.default, aten.stack.default, aten.broadcast_tensors.default, aten.chunk.default}
    | {aten.where.self, aten.abs.default, aten.index_select.default, aten.gather.default, aten.take.default}
    | {aten.index.Tensor, aten.max.dim, aten.min.dim, aten.topk.default, aten.sort.default, aten.sort.stable}
)
"""Operators whose results are elements of tensors that they take, or their absolute values; so are views."""

_NO_ELEMENTS: dict[object, tuple[str, ...]] = {
    aten.where.self: ("condition",),
    **dict.fromkeys((aten.index_select.default, aten.gather.default, aten.take.default), ("index",)),
    aten.index.Tensor: ("indices",),
}
"""The tensors of which they take no elements."""

_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)

_FILLED: dict[object, int | str] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1),
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.new_full.default), "fill_value"),
}
"""Operators that fill a tensor with a number, or the argument that is the number."""

_ARITHMETIC: dict[object, Callable[[int, int], int]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.minimum.default: min,
    aten.maximum.default: max,
    aten.clamp_min.default: max,
    aten.clamp_max.default: min,
}
"""Operators of two operands that grow, or fall, with each of them."""

_GOING_AROUND = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)
_WITHOUT_LEAST = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes in which PyTorch finds no least number."""

_QUOTIENTS = (
    *(aten.floor_divide.default, aten.floor_divide.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode),
)
_REMAINDERS = (aten.remainder.Tensor, aten.remainder.Scalar)


def may_miss(module: fx.GraphModule, *, varies: bool = False) -> Iterator[fx.Node]:
    """The operators that are given a place which may be out of range, after `shapes.record_shapes`.

    If the sizes of the inputs vary, or values decide sizes, those recorded are no call's: any place that is
    computed may be.
    """
    known = ranges_of_integers(module)
    varies = varies or any(map(_has_a_size_of_values, module.graph.nodes))
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and any(_misses(module, node, known, varies)):
            yield node


def ranges_of_integers(module: fx.GraphModule) -> dict[fx.Node, Range]:
    """What the integers of tensors may be, after `shapes.record_shapes`, by the node that gives them."""
    known = dict[fx.Node, Range]()
    for node in module.graph.nodes:
        if _is_of_integers(node):
            _range(module, node, known)
    return known


def _has_a_size_of_values(node: fx.Node) -> bool:
    """Whether the values of what an operator reads decide the size of its result."""
    if not isinstance(node.target, OpOverload) or torch.Tag.dynamic_output_shape not in node.target.tags:
        return False
    if node.target is not aten.index.Tensor:
        return True
    places = arguments(node)["indices"]
    return any(isinstance(each, fx.Node) and gives_a_tensor(each) and _is_mask(node, each) for each in places)


def _misses(
    module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Range], varies: bool
) -> Iterator[bool]:
    """For each tensor of places, and each number that is computed, whether it may be out of range."""
    given = arguments(node)
    for name in _NAMES:
        places = given.get(name)
        places = list(places) if isinstance(places, Sequence) else [places]
        for number, each in enumerate(places):
            if not isinstance(each, fx.Node):
                continue
            if not gives_a_tensor(each) or (varies and not is_constant(each)):
                yield True
            elif _is_of_integers(each) and not _is_mask(node, each):
                size = _size(node, given, places[:number])
                low, high = _range(module, each, known)
                yield high >= size or low < (-size if node.target in _FROM_THE_END else 0)


def _is_of_integers(node: fx.Node) -> bool:
    if not gives_a_tensor(node):
        return False
    dtype = dtype_of(node)
    return not dtype.is_floating_point and not dtype.is_complex


def _is_mask(reader: fx.Node, places: fx.Node) -> bool:
    """Whether places are told by what is true; bytes count as that where PyTorch's indices are meant."""
    dtype = dtype_of(places)
    return dtype is torch.bool or (dtype is torch.uint8 and reader.target in _INDEXED)


def _size(node: fx.Node, given: dict[str, Any], before: Sequence[object]) -> int:
    """How many places there are for indices that follow those `before`; 0 where that is not known."""
    source, target = given.get("self", given.get("weight")), node.target
    if not isinstance(source, fx.Node):
        return 0
    shape = shape_of(source)
    if target in (aten.take.default, aten.put.default):
        return math.prod(shape)
    if target in _INDEXED:
        masks = [each for each in before if isinstance(each, fx.Node) and _is_mask(node, each)]
        place = len(before) + sum(len(shape_of(each)) - 1 for each in masks)
        return shape[place] if place < len(shape) else 0
    if target in (aten.max_unpool2d.default, aten.max_unpool3d.default):
        counts = given["output_size"]
        return math.prod(counts) if all(isinstance(each, int) for each in counts) else 0
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
        if value is None or value.dtype in _WITHOUT_LEAST:
            return None
        return (int(value.min()), int(value.max())) if value.numel() else (0, 0)
    if node.op != "call_function":
        return None
    source, number = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 1)
    assert isinstance(source, fx.Node)
    if not isinstance(source.target, OpOverload):
        return None
    if number == 1 and source.target in _PLACES:
        return 0, _length(source) - 1
    if source.target in _POOLINGS:
        return _pooled(source) if number == 1 else None
    given = arguments(source)
    if source.target in _ELEMENTS or _is_view(source):
        return _of_elements(module, source, given, known, node)
    if source is not node:
        return None
    return _calculated(node, given, lambda value: _operand(module, value, known, node))


def _calculated(
    node: fx.Node, given: dict[str, Any], operand: Callable[[object], Range | None]
) -> Range | None:
    target = node.target
    if target in _COUNTS:
        return _counted(given)
    if target in _FILLED:
        filled = _FILLED[target]
        return operand(given[filled] if isinstance(filled, str) else filled)
    first = operand(node.args[0]) if node.args else None
    if first is None:
        return None
    if _is_cast(node):
        return first
    if target is aten.clamp.default:
        return _clamped(first, given["min"], given["max"], operand)
    if target in (aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default):
        count = math.prod(shape_of(node.args[0]))  # type: ignore[arg-type]
        return min(0, first[0] * count, first[0]), max(0, first[1] * count, first[1])
    second = operand(node.args[1]) if len(node.args) > 1 else None
    if second is None:
        return None
    if target in _REMAINDERS:
        return (0, second[1] - 1) if second[0] > 0 else None
    if target in _QUOTIENTS and given.get("rounding_mode", "floor") is not None:
        low, high = _ends(operator.floordiv, first, second) if second[0] > 0 else _of_dtype(node)
        return low, high if given.get("rounding_mode") != "trunc" else max(high, 0)
    if node.kwargs:
        return None
    compute = _ARITHMETIC.get(target)
    return None if compute is None else _ends(compute, first, second)


def _ends(compute: Callable[[int, int], int], first: Range, second: Range) -> Range:
    ends = [compute(a, b) for a in first for b in second]
    return min(ends), max(ends)


def _is_view(node: fx.Node) -> bool:
    """Whether the results of one of PyTorch's operators are elements of its input, in its memory."""
    overload = node.target
    assert isinstance(overload, OpOverload)
    if overload.namespace != "aten" or overload in (aten.view.dtype, aten._neg_view.default):
        return False
    shared = [each.alias_info for each in overload._schema.returns if each.alias_info is not None]
    return bool(shared) and not any(each.is_write for each in shared)


def _of_elements(
    module: fx.GraphModule, node: fx.Node, given: dict[str, Any], known: dict[fx.Node, Range], read: fx.Node
) -> Range | None:
    """The range of the results of an operator of elements, or of the one of them that is read."""
    apart, taken = _NO_ELEMENTS.get(node.target, ()), list[fx.Node]()
    fx.map_arg([value for name, value in given.items() if name not in apart], taken.append)
    sources = [_operand(module, each, known, read) for each in taken]
    found = [each for each in sources if each is not None]
    if not found or len(found) < len(sources):
        return None
    low, high = min(low for low, _ in found), max(high for _, high in found)
    return (low, high) if node.target is not aten.abs.default else (0, max(-low, high))


def _pooled(node: fx.Node) -> Range | None:
    """The places of maxima; None where a window may lie in the padding alone: its place is none."""
    given, dims = arguments(node), _POOLINGS[node.target]
    if any(given.get("padding", ())) and any(step != 1 for step in given.get("dilation", ())):
        return None
    return 0, math.prod(shape_of(node.all_input_nodes[0])[-dims:]) - 1


def _is_cast(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in (aten.to, aten._to_copy)


def _operand(
    module: fx.GraphModule, value: object, known: dict[fx.Node, Range], reader: fx.Node
) -> Range | None:
    """The range of an operand; None where its reader takes other numbers: it casts them to its own dtype.

    Sums, differences and products go around as their operands do.
    """
    if isinstance(value, int):
        found = value, value
    elif isinstance(value, fx.Node) and _is_of_integers(value):
        found = _range(module, value, known)
    else:
        return None
    whole = _of_dtype(reader)
    is_taken = (whole[0] <= found[0] and found[1] <= whole[1]) or reader.target in _GOING_AROUND
    return found if is_taken else None


def _clamped(
    before: Range, low: object, high: object, operand: Callable[[object], Range | None]
) -> Range | None:
    for bound, limit in ((low, max), (high, min)):
        if bound is not None:
            if (number := operand(bound)) is None:
                return None
            before = limit(before[0], number[0]), limit(before[1], number[1])
    return before


def _counted(given: dict[str, Any]) -> Range | None:
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    is_whole = all(isinstance(each, int) for each in (start, end, step))
    return (start, end - 1) if is_whole and start < end and step > 0 else None


def _length(node: fx.Node) -> int:
    """The size of the dimension in which an operator finds places; of all dimensions, if it has none."""
    given = arguments(node)
    shape, dim = shape_of(given["self"]), given.get("dim")
    return math.prod(shape) if dim is None else shape[dim] if shape else 1
