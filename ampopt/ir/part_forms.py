"""Forms for ONNX of what reads or writes a part of a tensor: what a mask selects, and a diagonal.

torch.onnx has no operator for either; the first is an index by the mask. ONNX Runtime's mean of nothing is
not PyTorch's, NaN.

Correct because: a mean is the sum by how many there are, and 0 / 0 is NaN; `masked_select` is an index by the
mask, both repeated to one shape, by its definition. A diagonal's k-th element stands in the row k steps from
the diagonal's first one; so each row has its own element beside it, which is chosen where the column less the
row is the diagonal's offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, dtype_of, shape_of
from ampopt.ir.plain_forms import chosen


def _selected(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    parts = [values["self"], values["mask"]]
    shapes = [shape_of(part) for part in parts]
    shape = list(torch.broadcast_shapes(*shapes))
    source, mask = (
        part if list(own) == shape else call(aten.expand.default, part, shape)
        for part, own in zip(parts, shapes, strict=True)
    )
    return call(aten.index.Tensor, source, [mask])


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
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
