"""Operators that read memory by strides: they find their argument as eager lays it out, whatever passes do.

`as_strided` sees memory, not elements. A graph keeps elements: a pass may lay out a tensor otherwise, fold a
view of a weight into a weight of its own, or make the caller's input contiguous. So it reads a copy that lies
as its argument does in eager, which is possible where it reads that argument's elements alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.errors import CaptureError
from ampopt.ir.aliasing import may_be_memory_of
from ampopt.ir.graph import STRIDED, arguments, aten, calls, insert_call, where

_ANTIALIASED = (
    *(aten._upsample_bilinear2d_aa.vec, aten._upsample_bilinear2d_aa.default),
    *(aten._upsample_bicubic2d_aa.vec, aten._upsample_bicubic2d_aa.default),
)


def fix_layouts(module: fx.GraphModule) -> None:
    """Let operators that depend on strides find their arguments as eager lays them out.

    Raises CaptureError where an operator reads memory that is not of its argument's elements. Requires that
    the nodes have their values (`val`).
    """
    for node in calls(module, STRIDED):
        _fix_strided(module, node)
    for node in calls(module, _ANTIALIASED):
        if _is_column(node):
            _fix_format(module, node)


def _fix_strided(module: fx.GraphModule, node: fx.Node) -> None:
    own = arguments(node)
    source, value = own["self"], own["self"].meta.get("val")
    first = _first_element(own, value)
    numbers = (first, *own["size"], *own["stride"])
    if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in (*numbers, *value.stride())):
        raise CaptureError(f"what it reads depends on more than the sizes of the example: {where(node)}")
    if own["storage_offset"] is not None and may_be_memory_of(source, "placeholder"):
        raise CaptureError(f"it reads from the beginning of a memory that its caller gives: {where(node)}")
    last = first + sum((size - 1) * stride for size, stride in zip(own["size"], own["stride"], strict=True))
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    is_moved, is_scatter = not value.is_contiguous(), node.target is aten.as_strided_scatter.default
    is_dense = value.permute(order).is_contiguous()
    reads_own = math.prod(own["size"]) == 0 or 0 <= first <= last < value.numel()
    if not is_dense or not reads_own or (is_moved and is_scatter):
        raise CaptureError(f"it reads memory that is not of its argument's elements alone: {where(node)}")
    rows = insert_call(module, node, aten.permute.default, source, order) if is_moved else source
    if is_moved or source.op == "call_function":
        rows = insert_call(module, node, aten.clone.default, rows, memory_format=torch.contiguous_format)
    node.replace_input_with(source, rows)
    node.args, node.kwargs = (*node.args[: 1 + is_scatter], own["size"], own["stride"], first), {}


def _first_element(own: Mapping[str, Any], value: object) -> Any:
    """The place of the first element that is read, from the argument's own first one on."""
    offset = own["storage_offset"]
    if offset is None or not isinstance(value, Tensor):
        return 0
    return offset - value.storage_offset()


def _is_column(node: fx.Node) -> bool:
    """Whether a result is one pixel wide: PyTorch antialiases that wrongly with the channel innermost."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.shape[-1] == 1


def _fix_format(module: fx.GraphModule, node: fx.Node) -> None:
    """A copy in the usual memory format stands between a node and its argument, where eager's has that."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = source.meta.get("val")
    if source.op == "call_function" and isinstance(value, Tensor) and value.is_contiguous():
        copied = insert_call(module, node, aten.clone.default, source, memory_format=torch.contiguous_format)
        node.replace_input_with(source, copied)
