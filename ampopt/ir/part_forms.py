"""Forms for ONNX of what reads or writes a part of a tensor: what a mask selects, and a diagonal.

torch.onnx has no operator for either; the first is an index by the mask. ONNX Runtime's mean of nothing is
not PyTorch's, NaN.

Correct because: a mean is the sum by how many there are, and 0 / 0 is NaN; `masked_select` is an index by the
mask, both repeated to one shape, by its definition. A diagonal's k-th element stands in the row k steps from
the diagonal's first one; so each row has its own element beside it, which is chosen where the column less the
row is the diagonal's offset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, dtype_of, shape_of
from ampopt.ir.plain_forms import chosen


def _selected(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    source, mask = values["self"], values["mask"]
    shape = torch.broadcast_shapes(shape_of(source), shape_of(mask))
    if shape_of(mask) != shape:
        everywhere = call(aten.ones_like.default, source, dtype=torch.bool)
        mask = call(aten.logical_and.default, mask, everywhere)
    if shape_of(source) != shape:
        source = call(aten.expand_as.default, source, mask)
    return call(aten.index.Tensor, source, [mask])


def _put_by_mask(call: Call, node: fx.Node) -> Any:
    """What is the same at all places of a mask: torch.onnx knows no mask behind other dimensions."""
    values = arguments(node)
    indices, source, given = values["indices"], values["self"], values["values"]
    before = len(indices) - 1
    if values["accumulate"] or any(index is not None for index in indices[:before]):
        return None
    if not isinstance(mask := indices[before], fx.Node) or dtype_of(mask) is not torch.bool:
        return None
    behind = len(shape_of(source)) - before - len(shape_of(mask))
    if math.prod(shape_of(given)) != 1 and len(shape_of(given)) > behind:
        return None
    shaped = _beside(call, mask, before, behind)
    if len(shape_of(given)) > len(shape_of(source)):
        given = call(aten.reshape.default, given, [])
    return chosen(call, dtype_of(node), shaped, given, source)


def _beside(call: Call, mask: Any, before: int, behind: int) -> Any:
    """A mask with dimensions of size 1 before its own, and behind them."""
    for dim in [0] * before + [-1] * behind:
        mask = call(aten.unsqueeze.default, mask, dim)
    return mask


def mean_of_selected(call: Call, node: fx.Node) -> Any:
    """A mean of what a mask selects: the sum by how many there are. Of nothing it is NaN."""
    values = arguments(node)
    source = values["self"]
    if values["dtype"] is not None or not shape_of(source) or not _is_selected(source):
        return None
    mean = _mean(call, _wide(call, source), values.get("dim"), values.get("keepdim", False))
    return call(aten._to_copy.default, mean, dtype=dtype_of(node))


def spread_of_selected(call: Call, node: fx.Node, *, is_deviation: bool) -> Any:
    """A variance or standard deviation of what a mask selects: of too few it is NaN."""
    values = arguments(node)
    source, dims = values["self"], values.get("dim")
    if not shape_of(source) or not _is_selected(source):
        return None
    correction = values.get("correction")
    if correction is None:
        correction = 1.0 if values.get("unbiased", True) else 0.0
    wide = _wide(call, source)
    mean = _mean(call, wide, dims or list(range(len(shape_of(source)))), True)
    centred = call(aten.sub.Tensor, wide, mean)
    how = _how(dims, values.get("keepdim", False))
    total = _sum(call, call(aten.mul.Tensor, centred, centred), how)
    count = _sum(call, call(aten.ones_like.default, wide), how)
    divisor = call(aten.relu.default, call(aten.sub.Tensor, count, correction))
    found = call(aten.div.Tensor, total, divisor)
    found = call(aten.sqrt.default, found) if is_deviation else found
    return call(aten._to_copy.default, found, dtype=dtype_of(node))


def _mean(call: Call, source: Any, dims: list[int] | None, keepdim: bool) -> Any:
    how = _how(dims, keepdim)
    count = _sum(call, call(aten.ones_like.default, source), how)
    return call(aten.div.Tensor, _sum(call, source, how), count)


def _how(dims: list[int] | None, keepdim: bool) -> tuple[Any, ...]:
    return (dims, keepdim) if dims else ()


def _sum(call: Call, source: Any, how: tuple[Any, ...]) -> Any:
    return call(aten.sum.dim_IntList if how else aten.sum.default, source, *how)


def _wide(call: Call, source: fx.Node) -> Any:
    """Numbers whose sum PyTorch keeps in float32, in that."""
    is_half = dtype_of(source) in (torch.float16, torch.bfloat16)
    return call(aten._to_copy.default, source, dtype=torch.float32) if is_half else source


_BY_ROW = (aten._to_copy.default, aten.clone.default, aten.linear.default, aten.layer_norm.default)
"""Operators beside those of single elements whose result has as many rows as their argument."""


def _is_selected(node: fx.Node) -> bool:
    """Whether a tensor comes of an index by a mask, row by row, so that it may be without elements."""
    seen, todo = {node}, [node]
    while todo:
        source = todo.pop()
        if source.target is aten.index.Tensor:
            indices = [index for index in source.args[1] if isinstance(index, fx.Node)]  # type: ignore[union-attr]
            if any(index.op != "get_attr" and dtype_of(index) is torch.bool for index in indices):
                return True
        overload = source.target
        if overload in _BY_ROW or (
            isinstance(overload, torch._ops.OpOverload)
            and (torch.Tag.pointwise in overload.tags or overload.is_view)
        ):
            todo += (new := set(source.all_input_nodes) - seen)
            seen |= new
    return False


def _with_diagonal(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    offset, rank = values["offset"], len(shape_of(node))
    dims = [values[name] % rank for name in ("dim1", "dim2")]
    order = [dim for dim in range(rank) if dim not in dims] + dims
    height, width = (shape_of(node)[dim] for dim in dims)
    if (length := shape_of(values["src"])[-1]) == 0:
        return call(aten.clone.default, values["self"])
    rows, columns = (call(aten.arange.default, size) for size in (height, width))
    is_on_it = call(
        aten.eq.Scalar, call(aten.sub.Tensor, columns, call(aten.unsqueeze.default, rows, 1)), offset
    )
    places = call(aten.clamp.default, call(aten.add.Scalar, rows, min(offset, 0)), 0, length - 1)
    beside = call(aten.unsqueeze.default, call(aten.index_select.default, values["src"], -1, places), -1)
    turned = call(aten.permute.default, values["self"], order)
    written = chosen(call, dtype_of(node), is_on_it, beside, turned)
    return call(aten.permute.default, written, [order.index(dim) for dim in range(rank)])


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.masked_select.default: _selected,
    aten.diagonal_scatter.default: _with_diagonal,
    aten.index_put.default: _put_by_mask,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
