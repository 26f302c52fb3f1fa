"""Forms for ONNX of what stands at a place in order: a stable sort, the k-th smallest, a median, a search.

torch.onnx knows `sort` and `topk` alone. A median of a few frames filters a robot's sensors.

Correct because: a search takes PyTorch's own steps; ONNX's TopK, which it makes of both, puts the lower place
first of equal values, so that it is stable in either direction, and bytes are in the order of the booleans
that they are made of; the last of the k smallest is the k-th, where infinity stands for NaN, which is the
largest to PyTorch, and a place of its own is found for either; its median is the lower of two middle numbers,
or NaN at the first place of one. The size of a median's dimension must not vary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, dtype_of, replace_result, shape_of


def _stable(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    source, order = values["self"], (values["dim"], values["descending"])
    is_bool = dtype_of(source) is torch.bool
    wide = call(aten._to_copy.default, source, dtype=torch.uint8) if is_bool else source
    if node.target is aten.argsort.stable:
        return call(aten.argsort.default, wide, *order)
    if not is_bool:
        return call(aten.sort.default, source, *order)
    found = call(aten.sort.default, wide, *order)
    for reader in list(node.users):
        part = call(operator.getitem, found, reader.args[1])
        is_value = reader.args[1] == 0
        replace_result(reader, call(aten._to_copy.default, part, dtype=torch.bool) if is_value else part)
    return None


def _kth_value(call: Call, node: fx.Node) -> None:
    values = arguments(node)
    source, dim, k = values["self"], values["dim"], values["k"]
    if not shape_of(source):
        return
    value, place = _smallest(call, source, source, k, dim)
    if dtype_of(source).is_floating_point:
        is_nan = call(aten.isnan.default, source)
        count = call(aten.sum.dim_IntList, call(aten.logical_not.default, is_nan), [dim], True)
        is_missing = call(aten.lt.Scalar, count, k)
        for is_one, are_such in (
            (call(aten.eq.Scalar, value, math.inf), call(aten.eq.Scalar, source, math.inf)),
            (is_missing, is_nan),
        ):
            place = call(aten.where.self, is_one, _first(call, source, are_such, dim), place)
        value = call(aten.masked_fill.Scalar, value, is_missing, math.nan)
    _give(call, node, value, place)


def _first(call: Call, like: fx.Node, marks: Any, dim: int) -> Any:
    """The place of the first mark."""
    return call(aten.argmax.default, call(aten._to_copy.default, marks, dtype=dtype_of(like)), dim, True)


def _median(call: Call, node: fx.Node) -> None:
    values = arguments(node)
    source, dim = values["self"], values["dim"]
    if math.prod(shape_of(source)) and shape_of(source):
        _give(call, node, *_middle(call, source, source, dim, shape_of(source)[dim]))


def _median_of_all(call: Call, node: fx.Node) -> Any:
    source = arguments(node)["self"]
    if not math.prod(shape_of(source)):
        return None
    flat = call(aten.reshape.default, source, [-1])
    value, _ = _middle(call, source, flat, 0, math.prod(shape_of(source)))
    return call(aten.squeeze.dim, value, 0)


def _middle(call: Call, like: fx.Node, numbers: Any, dim: int, size: int) -> tuple[Any, Any]:
    """The median of numbers of the dtype of `like`, and its place; the dimension stays, of size 1."""
    numbers = call(aten.unflatten.int, numbers, dim, [size])  # refuses another size
    value, place = _smallest(call, like, numbers, (size + 1) // 2, dim)
    if not dtype_of(like).is_floating_point:
        return value, place
    is_nan = call(aten.isnan.default, numbers)
    has_nan = call(aten.any.dim, is_nan, dim, True)
    value = call(aten.masked_fill.Scalar, value, has_nan, math.nan)
    return value, call(aten.where.self, has_nan, _first(call, like, is_nan, dim), place)


def _smallest(call: Call, like: fx.Node, numbers: Any, k: int, dim: int) -> tuple[Any, Any]:
    """The k-th smallest, with infinity for NaN, and its place; the dimension stays, of size 1."""
    if dtype_of(like).is_floating_point:
        is_nan = call(aten.isnan.default, numbers)
        numbers = call(aten.masked_fill.Scalar, numbers, is_nan, math.inf)
    found = call(aten.topk.default, numbers, k, dim, False, True)
    value, place = (call(operator.getitem, found, part) for part in range(2))
    return tuple(call(aten.slice.Tensor, each, dim, k - 1, k) for each in (value, place))


def _give(call: Call, node: fx.Node, value: Any, place: Any) -> None:
    """Let the readers of a call's two results have these."""
    values = arguments(node)
    for reader in list(node.users):
        found = (value, place)[reader.args[1]]  # type: ignore[index]
        replace_result(reader, found if values["keepdim"] else call(aten.squeeze.dim, found, values["dim"]))


def _place_in_order(call: Call, node: fx.Node) -> Any:
    """The place by PyTorch's own bisection, so that it is the same in any row, also with NaN."""
    values = arguments(node)
    row, value = values["sorted_sequence"], values["self"]
    if values["sorter"] is not None or not shape_of(row) or not shape_of(row)[-1]:
        return None
    is_right = values["side"] == "right" if values["side"] is not None else values["right"]
    count = shape_of(row)[-1]
    row = call(aten.unflatten.int, row, -1, [count])  # refuses another size
    begin = call(aten.zeros_like.default, value, dtype=torch.int64)
    end = call(aten.full_like.default, value, count, dtype=torch.int64)
    for _ in range(count.bit_length()):
        middle = call(aten.div.Tensor_mode, call(aten.add.Tensor, begin, end), 2, rounding_mode="floor")
        number = _at(
            call, row, call(aten.clamp_max.default, middle, count - 1), values["sorted_sequence"], value
        )
        is_after = call(aten.gt.Tensor if is_right else aten.ge.Tensor, number, value)
        is_open = call(aten.lt.Tensor, begin, end)
        goes_on = call(aten.logical_and.default, is_open, call(aten.logical_not.default, is_after))
        ends = call(aten.logical_and.default, is_open, is_after)
        begin = call(aten.where.self, goes_on, call(aten.add.Scalar, middle, 1), begin)
        end = call(aten.where.self, ends, middle, end)
    return call(aten._to_copy.default, begin, dtype=dtype_of(node))


def _at(call: Call, row: Any, places: Any, of_row: fx.Node, value: fx.Node) -> Any:
    """The numbers at places of one row for all values, or of each value's own."""
    if len(shape_of(of_row)) > 1:
        return call(aten.gather.default, row, -1, places)
    flat = call(aten.index_select.default, row, 0, call(aten.reshape.default, places, [-1]))
    return call(aten.view_as.default, flat, value)


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.sort.stable: _stable,
    aten.argsort.stable: _stable,
    aten.kthvalue.default: _kth_value,
    aten.median.dim: _median,
    aten.median.default: _median_of_all,
    aten.searchsorted.Tensor: _place_in_order,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
