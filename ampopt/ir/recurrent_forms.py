"""Forms of LSTMs that project their hidden state to fewer numbers, for ONNX, whose LSTM does not.

Of such a layer torch.onnx writes an LSTM without the projection, which has other sizes.

Correct because: a layer keeps h' = P h, of which its gates read W h' = (W P) h. So it is a layer that keeps h
and has W P for W, and P projects its results. That layer begins with h = 0, as P may make the given h' of no
h; its first step reads the given h' as more of its input, with the weights W, for which all other steps have
0. The other direction is a layer of the steps in reverse.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, replace_result, shape_of

_END = 2**63 - 1


def _projected(call: Call, node: fx.Node) -> None:
    """Each layer and each direction by itself."""
    values = arguments(node)
    directions = 2 if values["bidirectional"] else 1
    count = values["num_layers"] * directions
    size = len(values["params"]) // count
    if size != (5 if values["has_biases"] else 3):
        return
    steps = call(aten.transpose.int, values["input"], 0, 1) if values["batch_first"] else values["input"]
    results, hidden, cells = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    for part in range(count):
        weights = values["params"][part * size : (part + 1) * size]
        given, cell = (call(aten.slice.Tensor, each, 0, part, part + 1) for each in values["hx"])
        is_reverse = part % directions == 1
        entered = call(aten.flip.default, steps, [0]) if is_reverse else steps
        result, cell = _layer(call, entered, given, cell, weights)
        hidden.append(call(aten.slice.Tensor, result, 0, -1, _END))
        cells.append(cell)
        results.append(call(aten.flip.default, result, [0]) if is_reverse else result)
        if len(results) == directions:
            steps, results = call(aten.cat.default, results, -1), []
    if values["batch_first"]:
        steps = call(aten.transpose.int, steps, 0, 1)
    made = steps, call(aten.cat.default, hidden), call(aten.cat.default, cells)
    for reader in list(node.users):
        replace_result(reader, made[reader.args[1]])  # type: ignore[index]


def _layer(
    call: Call, steps: fx.Node, given: fx.Node, cell: fx.Node, weights: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """The results of a layer that begins with these states, and its last cells."""
    of_input, of_hidden, *biases, projection = weights
    number = call(aten.slice.Tensor, call(aten.slice.Tensor, steps, 0, 1, _END), 2, 0, 1)
    none = call(aten.full_like.default, number, 0.0)
    none = call(aten.expand.default, none, [-1, -1, shape_of(projection)[0]])
    entered = call(aten.cat.default, [steps, call(aten.cat.default, [given, none])], -1)
    merged = [
        call(aten.cat.default, [of_input, of_hidden], 1),
        call(aten.mm.default, of_hidden, projection),
    ]
    states = [call(aten.full_like.default, cell, 0.0), cell]
    plain = call(
        aten.lstm.input, entered, states, [*merged, *biases], bool(biases), 1, 0.0, False, False, False
    )
    result, cell = (call(operator.getitem, plain, place) for place in (0, 2))
    return call(aten.linear.default, result, projection), cell


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {aten.lstm.input: _projected}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
