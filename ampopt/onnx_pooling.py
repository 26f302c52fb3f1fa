"""Max pooling's places, and unpooling by them, in the operators that ONNX Runtime's CPU has for them.

PyTorch counts the places in which a pooling found its maxima from the beginning of each channel, ONNX from
the beginning of the tensor. The exporter makes up for that with a second pooling, over one pixel, whose
first place in each channel it subtracts: a constant. Unpooling it writes as a scattering of single numbers
into zeros, where ONNX has an operator that is five times as fast.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def use_pooling_operators(model: Any) -> None:
    """Replace both in an `onnx_ir.Model`, in place, where shapes are fixed."""
    graph = model.graph
    for node in list(graph):
        if node.op_type == "MaxPool" and len(node.outputs) == 2:
            _fold_first_places(graph, node)
    for node in list(graph):
        if node.op_type == "ScatterND":
            _unpool(graph, node)


def _fold_first_places(graph: Any, pool: Any) -> None:
    """Places of a pooling over one pixel are 0, 1, 2 and so on: what is sliced out of them is a constant."""
    shape, slices = _sizes(pool.outputs[1]), [use.node for use in pool.outputs[1].uses()]
    ones = {value for name in ("kernel_shape", "strides") for value in _ints(pool, name)}
    if ones != {1} or any(_ints(pool, "pads")) or not shape or pool.outputs[1].is_graph_output():
        return
    for each in slices:
        bounds = [_constant(value) for value in each.inputs[1:]]
        if each.op_type != "Slice" or len(bounds) != 3 or any(b is None for b in bounds):
            continue
        chosen = [slice(None)] * len(shape)
        for start, stop, axis in zip(*bounds, strict=True):
            chosen[axis] = slice(start, stop)
        places = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)[tuple(chosen)]
        _replace(graph, each, _initializer(graph, np.ascontiguousarray(places), each.outputs[0].name))


def _unpool(graph: Any, scatter: Any) -> None:
    """Scattering into a row of zeros, by places that a pooling has found, is unpooling."""
    import onnx_ir

    zeros, places, numbers = scatter.inputs
    room, given = _sizes(zeros), _sizes(numbers)
    spread = places.producer()
    if len(room) != 1 or len(given) != 1 or spread is None or spread.op_type != "Unsqueeze":
        return
    if not _is_zero(zeros) or _text(scatter, "reduction") != "none":
        return
    if (bound := _bound(spread.inputs[0])) is None or bound > room[0]:
        return
    name = scatter.outputs[0].name
    flat = _initializer(graph, np.array([1, 1, given[0]]), f"{name}_flat")
    wide = _initializer(graph, np.array([1, 1, room[0]]), f"{name}_room")
    row = _initializer(graph, np.array(room), f"{name}_row")
    value, index = (onnx_ir.node("Reshape", [each, flat]) for each in (numbers, spread.inputs[0]))
    pooled = onnx_ir.node(
        "MaxUnpool", [value.outputs[0], index.outputs[0], wide], attributes={"kernel_shape": [1]}
    )
    result = onnx_ir.node("Reshape", [pooled.outputs[0], row])
    nodes = [value, index, pooled, result]
    for each in nodes:
        each.outputs[0].name = f"{name}_{each.op_type}_{nodes.index(each)}"
    graph.insert_before(scatter, nodes)
    result.outputs[0].shape, result.outputs[0].type = scatter.outputs[0].shape, scatter.outputs[0].type
    _replace(graph, scatter, result.outputs[0])


def _bound(value: Any) -> int | None:
    """A number that all of these places are below, where they are a pooling's and never negative."""
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "MaxPool" and value is node.outputs[-1] is not node.outputs[0]:
        return int(np.prod(_sizes(node.inputs[0]) or [0])) or None
    if node.op_type in ("Reshape", "Unsqueeze", "Squeeze"):
        return _bound(node.inputs[0])
    if node.op_type not in ("Add", "Sub") or (constant := _constant(node.inputs[1])) is None:
        return None
    if node.op_type == "Add":
        below = _bound(node.inputs[0])
        return None if below is None or constant.min() < 0 else below + int(constant.max())
    pool = node.inputs[0].producer()
    if pool is None or pool.op_type != "MaxPool" or node.inputs[0] is pool.outputs[0]:
        return None
    if len(shape := _sizes(pool.inputs[0])) != 4:
        return None
    firsts = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)[:, :, :1, :1]
    return shape[2] * shape[3] if np.array_equal(constant, firsts) else None


def _is_zero(value: Any) -> bool:
    """Whether this is known to be full of zeros."""
    node = value.producer()
    if node is not None and node.op_type == "Reshape":
        return _is_zero(node.inputs[0])
    if node is not None and node.op_type == "ConstantOfShape":
        filling = node.attributes.get("value")
        return filling is None or not filling.as_tensor().numpy().any()
    found = _constant(value)
    return found is not None and not found.any()


def _constant(value: Any) -> Any:
    """The array of an initializer or a constant; None for anything else."""
    import onnx_ir

    tensor = onnx_ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def _sizes(value: Any) -> list[int]:
    """The shape where it is fixed, else nothing."""
    sizes = list(value.shape) if value.shape is not None else []
    return sizes if all(isinstance(size, int) for size in sizes) else []


def _ints(node: Any, name: str) -> list[int]:
    found = node.attributes.get(name)
    return [] if found is None else list(found.as_ints())


def _text(node: Any, name: str) -> str:
    found = node.attributes.get(name)
    return "none" if found is None else str(found.as_string())


def _initializer(graph: Any, array: Any, name: str) -> Any:
    """A new constant of the graph."""
    import onnx_ir

    value = onnx_ir.val(f"{name}_constant", const_value=onnx_ir.tensor(array))
    graph.register_initializer(value)
    return value


def _replace(graph: Any, node: Any, value: Any) -> None:
    """Let whatever reads a node's result read another value, and remove the node."""
    import onnx_ir

    onnx_ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
