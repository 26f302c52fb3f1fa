"""Forms for ONNX of what is scattered: means, extremes, and what stands at places of all elements.

torch.onnx leaves the divisor of a scattered mean out, and begins with the largest finite number for a minimum
of what is scattered alone, so that infinities are lost. It has neither `index_reduce` nor `put`.

Correct because: a mean is a sum by a count; infinity is no smaller than any number, so that a minimum that
begins with it is that of the others, and where none is, the tensor's own number stays; an index of slices is
one of elements, repeated along the other dimensions; and a place of all elements is one of the flat tensor.
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


def _scattered(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    given = values["dim"], values["index"], values["src"], values["reduce"], values["include_self"]
    return _reduced(call, node, values["self"], *given)


def _reduced(
    call: Call, node: fx.Node, data: Any, dim: int, index: Any, source: Any, way: str, with_data: bool
) -> Any:
    """None for what torch.onnx does right: sums, products, and extremes with the tensor's own numbers."""
    if way == "mean":
        return _mean(call, node, data, dim, index, source, with_data)
    if way not in ("amax", "amin") or with_data:
        return None
    dtype, is_max = dtype_of(node), way == "amax"
    if dtype is torch.bool:
        return None
    if dtype.is_floating_point:
        least: float = -math.inf if is_max else math.inf
    else:
        least = torch.iinfo(dtype).min if is_max else torch.iinfo(dtype).max
    begun = call(aten.full_like.default, data, least)
    found = call(aten.scatter_reduce.two, begun, dim, index, source, way, include_self=True)
    nothing = call(aten.zeros_like.default, data, dtype=torch.float32)
    ones = call(aten.ones_like.default, source, dtype=torch.float32)
    count = call(aten.scatter_add.default, nothing, dim, index, ones)
    return chosen(call, dtype, call(aten.gt.Scalar, count, 0), found, data)


def _mean(call: Call, node: fx.Node, data: Any, dim: int, index: Any, source: Any, with_data: bool) -> Any:
    if not dtype_of(node).is_floating_point:
        return None
    total = call(aten.scatter_reduce.two, data, dim, index, source, "sum", include_self=with_data)
    base = call(aten.full_like.default, data, 1.0 if with_data else 0.0)
    each = call(aten.full_like.default, source, 1.0)
    count = call(aten.scatter_reduce.two, base, dim, index, each, "sum")
    count = count if with_data else call(aten.maximum.default, count, call(aten.full_like.default, data, 1.0))
    return call(aten.div.Tensor, total, count)


def _reduced_slices(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    data, source, dim, way = values["self"], values["source"], values["dim"], values["reduce"]
    rank, with_data = len(shape_of(source)), values["include_self"]
    shape = [-1 if each == dim % rank else 1 for each in range(rank)]
    index = call(aten.expand_as.default, call(aten.reshape.default, values["index"], shape), source)
    found = _reduced(call, node, data, dim, index, source, way, with_data)
    if found is not None or way == "mean":
        return found
    return call(aten.scatter_reduce.two, data, dim, index, source, way, include_self=with_data)


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


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.scatter_reduce.two: _scattered,
    aten.index_reduce.default: _reduced_slices,
    aten.put.default: _put,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
