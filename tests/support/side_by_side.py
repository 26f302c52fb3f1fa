"""Functions side by side in one graph, each of an input of its own: one export for a whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir
from onnx_ir.convenience import extract
from torch import Tensor

from tests.helpers import Model

Functions = Mapping[str, Callable[[Tensor], Any]]


def side_by_side(functions: Functions) -> Model:
    """A model that takes an input for each function: nothing of one can be merged with another's."""
    return Model(lambda m, *xs: [f(x) for f, x in zip(functions.values(), xs, strict=True)]).eval()


def results_by_name(
    functions: Functions, inputs: Sequence[Tensor], found: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each function's name, a tensor that was found for it, and the one that it gives of its input."""
    rest = iter(found)
    for (name, function), x in zip(functions.items(), inputs, strict=True):
        results = function(x)
        for wanted in results if isinstance(results, tuple) else (results,):
            yield name, next(rest), wanted
    assert not [*rest], "there are more results than those of the functions"


def parts_of(model: onnx_ir.Model, counts: Sequence[int]) -> Iterator[bytes]:
    """A model taken apart: a file for each count, with as many of its outputs and what they are made of."""
    outputs = iter(model.graph.outputs)
    for count in counts:
        graph = extract(model.graph, model.graph.inputs, [next(outputs) for _ in range(count)])
        for place, taken in reversed([*enumerate(graph.inputs)]):
            if not taken.uses():
                del graph.inputs[place]
        part = onnx_ir.Model(graph, ir_version=model.ir_version, functions=[*model.functions.values()])
        yield onnx_ir.to_proto(part).SerializeToString()
