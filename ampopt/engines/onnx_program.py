"""The ONNX model of a program's graph that all engines of ONNX models share, so that it is exported once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx

from ampopt.engines.onnx_cache import exported
from ampopt.engines.onnx_graph import OPSETS, Dims, model_of
from ampopt.engines.onnx_nan import LOSING, keep_nan
from ampopt.engines.onnx_pooling import REPLACED, use_pooling_operators
from ampopt.ir.choosers import makes_choices, with_places

_INPUT = "input_"
"""The names of a model's inputs are this and their place."""

_PLACES = "places_of_"
"""The names of outputs that tell choices are this and their node."""


def place_of_input(name: str) -> int:
    """The place of an input among the graph's, by its name in the model: a runtime may drop unread ones."""
    return int(name.removeprefix(_INPUT))


def plain_model(graph: fx.GraphModule, entered: tuple[Tensor, ...], dims: Dims = ()) -> bytes:
    """The serialized ONNX model of a graph without its border, exported now or found in the cache.

    `entered` are the example inputs as the graph takes them, `dims` the dimensions that may vary. Raises
    ExportError for what ONNX cannot express.
    """
    if dims or not makes_choices(graph):
        return _exported(graph, entered, dims, ())
    return telling_model(graph, entered, ())


def telling_model(graph: fx.GraphModule, entered: tuple[Tensor, ...], told: Collection[str]) -> bytes:
    """The same model with places that it chooses as outputs after its own, in the graph's order.

    `told` are the names of their nodes in `choosers.with_places`. One export serves for any of them.
    """
    import onnx
    import onnx_ir
    from onnx_ir.passes import common

    module, names = with_places(graph)
    model = _exported(module, entered, (), names)
    if len(told) == len(names):
        return model
    left_out = {_PLACES + name for name in names if name not in told}
    changed = onnx_ir.from_proto(onnx.ModelProto.FromString(model))
    outputs = [value for value in changed.graph.outputs if value.name not in left_out]
    changed.graph.outputs.clear()
    changed.graph.outputs.extend(outputs)
    common.RemoveUnusedNodesPass()(changed)
    return bytes(onnx_ir.to_proto(changed).SerializeToString())


def _exported(graph: fx.GraphModule, entered: tuple[Tensor, ...], dims: Dims, places: Sequence[str]) -> bytes:
    """A graph's model, whose last outputs have the names of these places."""
    import onnx_ir

    results = graph.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    inputs = [f"{_INPUT}{index}" for index in range(len(entered))]
    own = range(len(results) - len(places))
    outputs = [*(f"output_{index}" for index in own), *(_PLACES + name for name in places)]
    named = dims or tuple(dict[int, str]() for _ in entered)

    def export() -> object:
        return onnx_ir.to_proto(model_of(graph, entered, OPSETS["onnxruntime"], inputs, outputs, named))

    return exported(graph, entered, export, dims)


def for_onnx_runtime(model: bytes) -> bytes:
    """A model with what ONNX Runtime needs for poolings and for NaN, see `onnx_pooling` and `onnx_nan`."""
    import onnx
    import onnx_ir

    proto = onnx.ModelProto.FromString(model)
    if (REPLACED | LOSING).isdisjoint(node.op_type for node in proto.graph.node):
        return model
    changed = onnx_ir.from_proto(proto)
    fit_onnx_runtime(changed)
    return bytes(onnx_ir.to_proto(changed).SerializeToString())


def fit_onnx_runtime(model: Any) -> None:
    """The same for an `onnx_ir.Model`, in place. Its outputs keep their names."""
    before = list(model.graph.outputs)
    use_pooling_operators(model)
    keep_nan(model)
    for old, new in zip(before, model.graph.outputs, strict=True):
        if new is not old:
            old.name, new.name = new.name, old.name
