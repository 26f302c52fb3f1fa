"""Forms for ONNX of what reads or writes a part of a tensor: what a mask or an index selects, a diagonal.

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


def _reduced_at(call: Call, node: fx.Node) -> Any:
    """With the index of each element, repeated along the other dimensions."""
    values = arguments(node)
    source, dim, rank = values["source"], values["dim"], len(shape_of(values["source"]))
    shape = [-1 if each == dim % rank else 1 for each in range(rank)]
    index = call(aten.expand_as.default, call(aten.reshape.default, values["index"], shape), source)
    reduced = values["self"], dim, index, source, values["reduce"]
    if values["reduce"] != "mean":
        return call(aten.scatter_reduce.two, *reduced, include_self=values["include_self"])
    if not dtype_of(node).is_floating_point:
        return None
    start = values["self"] if values["include_self"] else call(aten.zeros_like.default, values["self"])
    total = call(aten.scatter_add.default, start, dim, index, source)
    count = call(aten.ones_like.default if values["include_self"] else aten.zeros_like.default, start)
    count = call(aten.scatter_add.default, count, dim, index, call(aten.ones_like.default, source))
    is_none = call(aten.eq.Scalar, count, 0)
    return call(aten.where.self, is_none, values["self"], call(aten.div.Tensor, total, count))


def _put(call: Call, node: fx.Node) -> Any:
    """At places of the flattened tensor, from its end on where they are below 0."""
    values = arguments(node)
    source = values["self"]
    flat, index, given = (
        call(aten.reshape.default, each, [-1]) for each in (source, values["index"], values["source"])
    )
    count = call(aten.sum.default, call(aten.ones_like.default, flat, dtype=torch.int64))
    from_end = call(aten.add.Tensor, index, count)
    index = call(aten.where.self, call(aten.lt.Scalar, index, 0), from_end, index)
    written = aten.scatter_add.default if values["accumulate"] else aten.scatter.src
    return call(aten.view_as.default, call(written, flat, 0, index, given), source)


def mean_of_selected(call: Call, node: fx.Node) -> Any:
    """A mean of what a mask selects: the sum by how many there are. Of nothing it is NaN."""
    values = arguments(node)
    source = values["self"]
    if values["dtype"] is not None or not shape_of(source) or not _is_selected(source):
        return None
    how = (values["dim"], values["keepdim"]) if values.get("dim") else ()
    summed = aten.sum.dim_IntList if how else aten.sum.default
    count = call(summed, call(aten.ones_like.default, source), *how)
    return call(aten.div.Tensor, call(summed, source, *how), count)


def _is_selected(node: fx.Node) -> bool:
    """Whether a tensor comes of an index by a mask, so that it may be without elements."""
    seen, todo = {node}, [node]
    while todo:
        source = todo.pop()
        if source.target is aten.index.Tensor:
            indices = [index for index in source.args[1] if isinstance(index, fx.Node)]  # type: ignore[union-attr]
            if any(index.op != "get_attr" and dtype_of(index) is torch.bool for index in indices):
                return True
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
    aten.index_reduce.default: _reduced_at,
    aten.put.default: _put,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
