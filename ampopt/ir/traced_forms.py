"""Forms of operators whose trace TorchScript's freezing makes wrong: a GRU's cell on a CPU.

The trace has the steps of the cell, which write to parts of W h in place. The operator that makes the parts
(`unsafe_chunk`) does not say that they share its memory. So where h is a constant (slots that attention
refines, a first state that is learned), freezing keeps the parts as constants, and each call writes to what
the call before has left: the first result is right, and all others are wrong.

Correct because: r = sigmoid(W' x + W h), z = sigmoid(V' x + V h), n = tanh(U' x + r (U h)) and (h - n) z + n
are the steps of the cell, in its order, each with memory of its own.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, shape_of
from ampopt.ir.program import Program
from ampopt.ir.stable_forms import with_forms


def _gru_cell(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    hidden = values["hx"]
    size = shape_of(hidden)[1]

    def gates(source: Any, kind: str) -> list[fx.Node]:
        whole = call(aten.linear.default, source, values[f"w_{kind}"], values[f"b_{kind}"])
        return [call(aten.slice.Tensor, whole, 1, size * place, size * (place + 1)) for place in range(3)]

    of_input, of_hidden = gates(values["input"], "ih"), gates(hidden, "hh")
    reset, update = (
        call(aten.sigmoid.default, call(aten.add.Tensor, of_hidden[place], of_input[place]))
        for place in range(2)
    )
    read = call(aten.mul.Tensor, of_hidden[2], reset)
    new = call(aten.tanh.default, call(aten.add.Tensor, of_input[2], read))
    kept = call(aten.mul.Tensor, call(aten.sub.Tensor, hidden, new), update)
    return call(aten.add.Tensor, kept, new)


def graph_to_trace(program: Program) -> fx.GraphModule:
    """A copy of a program's graph, with its own weights, that TorchScript may trace and freeze."""
    graph = program.graph
    if program.device.type == "cpu":  # a GPU's cell is one kernel, which writes to nothing that it is given
        entered = [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]
        graph = with_forms(graph, entered, {aten.gru_cell.default: _gru_cell})
    return copy.deepcopy(graph).eval()
