"""Exact arithmetic on sizes that vary, for ONNX, whose division of integers rounds towards zero.

Python rounds a quotient down, so that -(-height // 8) * 8 is the next multiple of 8; at a multiple both
agree. ONNX has float32 for numbers that are no integers, and Python float64: 9 * 0.1 // 0.1 is 9 or 8.

Correct because: the dividend without its remainder, which has the divisor's sign in both, divides exactly.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ampopt.errors import ExportError
from ampopt.ir.graph import aten, where

_ROUNDS = {math.floor, math.ceil, math.trunc}

_DECIDES = {operator.floordiv, operator.mod, round, *_ROUNDS} | {
    *(aten.arange.default, aten.arange.start, aten.arange.start_step)
}
"""What makes another number, or another size, of a small difference."""


def use_exact_sizes(module: fx.GraphModule) -> None:
    """Rewrite the divisions of sizes in an exported graph, in place.

    Raises ExportError where a size is divided or a range counted in floating-point numbers.
    """
    for node in [each for each in module.graph.nodes if each.target in _DECIDES]:
        numbers = [each for each in _varying(node) if isinstance(_value(each), (float, torch.SymFloat))]
        if numbers and not (node.target in _ROUNDS and _is_ratio(numbers[0])):
            raise ExportError(
                f"ONNX computes numbers that sizes make in float32, and Python in float64, so that "
                f"{node.target} may have another result, and sizes vary: {where(node)}; compute sizes in "
                "integers, or export with static shapes"
            )
        if node.target is operator.floordiv:
            _divide_exactly(module.graph, node)
    module.recompile()


def _varying(node: fx.Node) -> list[fx.Node]:
    """The arguments of a call that sizes have made: numbers, and no tensors."""
    return [each for each in node.all_input_nodes if not isinstance(_value(each), torch.Tensor)]


def _is_ratio(node: fx.Node) -> bool:
    """Whether it divides one integer by another.

    Below 2**24 the quotient in float32 is on the same side of each integer as the exact one: that is further
    away than it is rounded.
    """
    return node.target is operator.truediv and all(map(_is_whole, node.args))


def _is_whole(argument: Any) -> bool:
    if isinstance(argument, fx.Node) and argument.target is torch.sym_float:
        return _is_whole(argument.args[0])
    return isinstance(_value(argument), (int, torch.SymInt))


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _divide_exactly(graph: fx.Graph, node: fx.Node) -> None:
    dividend, divisor = node.args[:2]
    with graph.inserting_before(node):
        rest = graph.call_function(operator.mod, (dividend, divisor))
        whole = graph.call_function(operator.sub, (dividend, rest))
    for made, function in ((rest, operator.mod), (whole, operator.sub)):
        made.meta = {**node.meta, "val": function(*(_value(each) for each in made.args))}
    node.args = (whole, divisor)
