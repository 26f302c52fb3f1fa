"""Forms of operators on integers for ONNX, whose own operators take other indices and round large numbers.

PyTorch refuses a negative index where it looks up rows; ONNX counts it from the end, and so answers what
eager refuses. torch.onnx divides integers in floating point, which is inexact from 2²⁴ on.

Correct because: an index that is not negative stays, and a negative one becomes one that no tensor has, which
ONNX Runtime refuses as eager does; a quotient of integers rounded down is ONNX's floor division, and towards
zero that of the dividend without its remainder, which divides exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.passes.shape_prop import ShapeProp

from ampopt.ir.graph import arguments, aten, calls, copy_of, dtype_of, finish, insert_call, replace

OUT_OF_RANGE = 2**31 - 1
"""The index that stands for a negative one: int32 has it, and no dimension is as long."""

INDEXED: dict[Any, str] = {
    aten.embedding.default: "indices",
    aten.index_select.default: "index",
    aten.gather.default: "index",
    aten.scatter.src: "index",
    aten.scatter.value: "index",
    aten.scatter.reduce: "index",
    aten.scatter.value_reduce: "index",
    aten.scatter_add.default: "index",
    aten.scatter_reduce.two: "index",
    aten.index_add.default: "index",
    aten.index_copy.default: "index",
}
"""Operators that refuse negative indices, and the argument that has these."""

DIVISIONS = (aten.div.Tensor_mode, aten.div.Scalar_mode)


def with_integer_forms(module: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    """The graph with checked indices and exact divisions of integers; unchanged if there are none.

    `examples` are inputs of the graph: a run on them tells which divisions are of integers.
    """
    divisions = [node for node in calls(module, DIVISIONS) if node.kwargs.get("rounding_mode")]
    if not divisions and not any(calls(module, INDEXED)):
        return module
    changed = copy_of(module)
    if divisions:
        ShapeProp(changed).propagate(*examples)
    for node in calls(changed, DIVISIONS):
        if node.kwargs.get("rounding_mode") and not dtype_of(node).is_floating_point:
            _divide_exactly(changed, node)
    for node in calls(changed, INDEXED):
        index = arguments(node)[INDEXED[node.target]]
        if isinstance(index, fx.Node) and index.op != "get_attr":  # a constant index was read already
            _refuse_negative(changed, node, index)
    return finish(changed)


def _divide_exactly(module: fx.GraphModule, node: fx.Node) -> None:
    a, b = node.args[:2]
    if node.kwargs["rounding_mode"] == "trunc":
        remainder = aten.fmod.Tensor if isinstance(b, fx.Node) else aten.fmod.Scalar
        a = insert_call(module, node, aten.sub.Tensor, a, insert_call(module, node, remainder, a, b))
    replace(node, insert_call(module, node, aten.floor_divide.default, a, b))


def _refuse_negative(module: fx.GraphModule, node: fx.Node, index: fx.Node) -> None:
    is_negative = insert_call(module, node, aten.lt.Scalar, index, 0)
    checked = insert_call(module, node, aten.masked_fill.Scalar, index, is_negative, OUT_OF_RANGE)
    node.replace_input_with(index, checked)
