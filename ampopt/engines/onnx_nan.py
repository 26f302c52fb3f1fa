"""Keeps NaN where ONNX Runtime's CPU provider makes numbers of it: in LSTMs, GRUs and scattered extremes.

Its gates compare, which NaN never wins, and so do its scattered maxima and minima. Sums keep NaN, so each
result gets one added that is 0, or NaN where a number is that the result depends on.

Correct because: a clamp to [0, 0] makes 0 of all but NaN. A recurrent layer's step depends on the input's
numbers of that step and of all before it (behind it, in reverse), which a running sum has, and on its initial
state; every gate reads all of them, so all features of the sequence are NaN. Of two infinities, which weights
of both signs multiply, a sum is NaN. Some features of the step itself may be spared in eager, where their
weights have one sign, or where NaN is in the initial state. A scattered maximum depends on the numbers that
the same indices scatter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ampopt.engines.onnx_pooling import constant_of, new_initializer

LOSING = frozenset({"LSTM", "GRU", "ScatterElements"})
"""The operators that are looked at: a model without them stays as it is."""

_COMPARING = frozenset({"MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "LSTM", "GRU"})
"""ONNX's operators that make numbers of NaN in ONNX Runtime, but for scattered extremes."""

_EXTREMES = ("max", "min")

_OF_CONSTANTS = ("Expand", "ConstantOfShape", "Constant", "Concat", "Cast", "Reshape")
"""What an initial state of constants comes through."""


def keep_nan(model: Any) -> None:
    """Let these operators of a float32 `onnx_ir.Model` keep NaN, in place."""
    import onnx_ir

    for node in list(model.graph):
        if node.op_type not in LOSING or node.inputs[0].dtype not in (None, onnx_ir.DataType.FLOAT):
            continue
        if node.op_type == "ScatterElements":
            _keep_scattered(model.graph, node)
        elif node.inputs[4] is None and not _whole(node, "layout"):  # of all steps
            _keep_in_sequence(model.graph, node)


def losing_operators(path: Path) -> list[str]:
    """The names of a file's operators that make numbers of NaN in ONNX Runtime, sorted."""
    import onnx_ir

    nodes = list(onnx_ir.load(path).graph.all_nodes())
    found = {node.op_type for node in nodes if node.op_type in _COMPARING}
    return sorted(found | {node.op_type for node in nodes if _reduction(node) in _EXTREMES})


def _reduction(node: Any) -> str:
    """How a scatter combines numbers; "none" for any other node."""
    is_scatter = node.op_type in ("ScatterElements", "ScatterND") and "reduction" in node.attributes
    return str(node.attributes["reduction"].as_string()) if is_scatter else "none"


class _Marks:
    """Makes nodes behind one node, whose values are named after its result."""

    def __init__(self, graph: Any, node: Any) -> None:
        self._graph, self._last, self._count = graph, node, 0
        self._name = next(output.name for output in node.outputs if output.name)

    def make(self, operator: str, *inputs: Any, **attributes: Any) -> Any:
        import onnx_ir

        node = onnx_ir.node(operator, inputs, attributes=attributes)
        node.outputs[0].name = f"{self._name}_nan_{self._count}"
        self._count += 1
        self._graph.insert_after(self._last, [node])
        self._last = node
        return node.outputs[0]

    def constant(self, number: Any) -> Any:
        self._count += 1
        return new_initializer(self._graph, np.asarray(number), f"{self._name}_{self._count}")

    def of(self, value: Any) -> Any:
        """0, or NaN where a value is."""
        zero = self.constant(np.zeros((), np.float32))
        return self.make("Clip", value, zero, zero)

    def of_products(self, value: Any, features: Any) -> Any:
        """0, or NaN where products of a matrix and these features are: one is NaN, or two are infinite."""
        import onnx_ir

        nan, zero = (self.constant(np.float32(number)) for number in (np.nan, 0.0))
        are_infinite = self.make("Cast", self.make("IsInf", value), to=onnx_ir.DataType.FLOAT)
        count = self.make("ReduceSum", are_infinite, features, keepdims=1)
        cancel = self.make("Greater", count, self.constant(np.float32(1.5)))
        kept = self.make("ReduceSum", self.of(value), features, keepdims=1)
        return self.make("Add", kept, self.make("Where", cancel, nan, zero))

    def add(self, result: Any, mark: Any) -> None:
        """Let whatever reads a result read its sum with a mark."""
        import onnx_ir

        if not (list(result.uses()) or result.is_graph_output()):
            return
        readers, added = list(result.uses()), self.make("Add", result, mark)
        added.shape, added.type = result.shape, result.type
        if result.is_graph_output():
            onnx_ir.convenience.replace_all_uses_with(result, added, replace_graph_outputs=True)
            added.producer().replace_input_with(0, result)
            return
        for reader, place in readers:
            reader.replace_input_with(place, added)


def _keep_in_sequence(graph: Any, node: Any) -> None:
    """Steps are the first dimension of a sequence, and its features the last: [steps, batch, features]."""
    marks = _Marks(graph, node)
    steps, features, directions = (marks.constant([dim]) for dim in (0, 2, 1))
    each = marks.of_products(node.inputs[0], features)
    total = marks.make("ReduceSum", each, steps, keepdims=1)
    direction = node.attributes["direction"].as_string() if "direction" in node.attributes else "forward"
    first = marks.constant(0)
    ways = {"forward": (0,), "reverse": (1,), "bidirectional": (0, 1)}[direction]
    running = [
        marks.make("Unsqueeze", marks.make("CumSum", each, first, reverse=way), directions) for way in ways
    ]
    so_far = marks.make("Concat", *running, axis=1) if len(running) > 1 else running[0]
    for state in node.inputs[5:7]:
        if state is None or _is_of_constants(state):
            continue
        is_multiplied = state is node.inputs[5]  # the cells are not
        initial = (
            marks.of_products(state, features)
            if is_multiplied
            else marks.make("ReduceSum", marks.of(state), features, keepdims=1)
        )
        total = marks.make("Add", total, initial)
        so_far = marks.make("Add", so_far, marks.make("Unsqueeze", initial, steps))
    for place, result in enumerate(node.outputs):
        if result is not None and result.name:
            marks.add(result, total if place else so_far)


def _keep_scattered(graph: Any, node: Any) -> None:
    """A second scatter adds the marks; one that makes room for another's numbers stays as it is."""
    import onnx_ir

    result = node.outputs[0]
    next_ones = [use.node for use in result.uses() if use.node.op_type == "ScatterElements"]
    makes_room = any(each.inputs[0] is result and each.inputs[1] is node.inputs[1] for each in next_ones)
    if _reduction(node) not in _EXTREMES or makes_room:
        return
    marks = _Marks(graph, node)
    data, numbers = (marks.of(node.inputs[place]) for place in (0, 2))
    axis = _whole(node, "axis")
    scattered = marks.make("ScatterElements", data, node.inputs[1], numbers, axis=axis, reduction="add")
    scattered.shape, scattered.type = result.shape, onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    marks.add(result, scattered)


def _whole(node: Any, name: str) -> int:
    return int(node.attributes[name].as_int()) if name in node.attributes else 0


def _is_of_constants(value: Any) -> bool:
    """Whether a value has no NaN, because it comes from constants without any."""
    found = constant_of(value)
    if found is not None:
        return not (np.issubdtype(found.dtype, np.floating) and bool(np.isnan(found).any()))
    node = value.producer()
    return (
        node is not None
        and node.op_type in _OF_CONSTANTS
        and all(
            _is_of_constants(each) for each in (node.inputs[:1] if node.op_type == "Expand" else node.inputs)
        )
    )
