"""Writes max pooling with indices, and max unpooling, with operators that ONNX Runtime's CPU provider has.

PyTorch counts the indices of a pooling's maxima from the beginning of each channel, ONNX from the beginning
of the tensor. The exporter corrects this with a second pooling, over one pixel, and subtracts its first index
in each channel, which is a constant. It exports unpooling as a scatter of single numbers into zeros, although
ONNX has an operator that is five times as fast.

ONNX Runtime's max pooling ignores NaN. Multiplication keeps NaN, so the result of a depthwise convolution
with zero weights is added to each pooling: over the same windows it is 0, or NaN if a pixel is NaN. ONNX
Runtime computes convolution and sum together, in no measurable time. PyTorch's index of such a maximum is its
window's last NaN's: a second pooling finds it, over the indices of the pixels that are NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_ARITHMETIC = {"Conv", "BatchNormalization", "Relu", "Sigmoid", "HardSwish"}
"""Operators whose results hold no infinity but by overflow. One that is put there, by a padding before a
pooling or a mask of -inf that is added, is no fault, and 0 times infinity would make one of it."""

_REDUCTIONS = {"GlobalMaxPool": "GlobalAveragePool", "ReduceMax": "ReduceSum", "ReduceMin": "ReduceSum"}
"""Maxima and minima that lose NaN, and what keeps it over the same numbers."""

REPLACED = frozenset({"MaxPool", "ScatterND", *_REDUCTIONS})
"""The operators that are looked at: a model without them stays as it is."""


def use_pooling_operators(model: Any) -> None:
    """Apply these replacements to a float32 `onnx_ir.Model`, in place, where shapes they need are fixed."""
    import onnx_ir

    graph = model.graph
    for node in list(graph):
        if node.op_type == "MaxPool" and len(node.outputs) == 2:
            _fold_first_places(graph, node)
    for node in list(graph):
        if node.op_type == "ScatterND":
            _unpool(graph, node)
    for node in list(graph):
        if node.op_type == "MaxPool" and len(node.outputs) == 2:
            _place_last_nan(graph, node)
    for node in list(graph):
        if node.op_type in ("MaxPool", *_REDUCTIONS) and node.inputs[0].dtype == onnx_ir.DataType.FLOAT:
            _keep_nan(graph, node)


def _keep_nan(graph: Any, node: Any) -> None:
    """Add 0 to a maximum, and NaN where there is one among the numbers that it is of."""
    import onnx_ir

    source, nodes = node.inputs[0], []
    producer = source.producer()
    if node.op_type == "MaxPool" and (_channels(source) is None or ends_of(node) is None):
        return
    if producer is None or producer.op_type not in _ARITHMETIC or node.op_type != "MaxPool":
        zero = new_initializer(graph, np.zeros((), np.float32), f"{node.outputs[0].name}_zero")
        nodes.append(onnx_ir.node("Clip", [source, zero, zero]))  # of all but NaN
        source = nodes[-1].outputs[0]
    if node.op_type == "MaxPool":
        nodes.append(_convolution_by_zeros(graph, node, source))
    else:
        nodes.append(onnx_ir.node(_REDUCTIONS[node.op_type], [source, *node.inputs[1:]]))
        for name in ("keepdims", "noop_with_empty_axes"):
            if name in node.attributes:
                nodes[-1].attributes[name] = node.attributes[name]
    result = node.outputs[0]
    nodes.append(added := onnx_ir.node("Add", [result, nodes[-1].outputs[0]]))
    for index, each in enumerate(nodes):
        each.outputs[0].name = f"{result.name}_nan_{index}"
    added.outputs[0].shape, added.outputs[0].type = result.shape, result.type
    onnx_ir.convenience.replace_all_uses_with(result, added.outputs[0], replace_graph_outputs=True)
    added.replace_input_with(0, result)
    graph.insert_after(node, nodes)


def _place_last_nan(graph: Any, pool: Any) -> None:
    """Let the index of a window with NaN be that of its last one, as PyTorch's is.

    Each pixel that is NaN becomes its index in the channel plus 1, each other one 0: the largest of a window
    is the last NaN's, or 0. Indices are exact in float32 below 2**24.
    """
    import onnx_ir

    image, places = pool.inputs[0], pool.outputs[1]
    sizes = _sizes(image)
    area = int(np.prod(sizes[2:])) if sizes else 0
    if image.dtype != onnx_ir.DataType.FLOAT or not 0 < area < 2**24:
        return
    if not (list(places.uses()) or places.is_graph_output()):
        return
    name = f"{places.name}_nan"
    numbered = np.arange(1, area + 1, dtype=np.float32).reshape(1, 1, *sizes[2:])
    before = np.arange(sizes[0] * sizes[1], dtype=np.int64).reshape(*sizes[:2], *[1] * len(sizes[2:])) * area
    zero = new_initializer(graph, np.zeros((), np.float32), f"{name}_zero")
    nodes = [lost := onnx_ir.node("IsNaN", [image])]
    number = new_initializer(graph, numbered, f"{name}_number")
    nodes.append(marked := onnx_ir.node("Where", [lost.outputs[0], number, zero]))
    nodes.append(last := onnx_ir.Node("", "MaxPool", [marked.outputs[0]], pool.attributes.values()))
    nodes.append(found := onnx_ir.node("Greater", [last.outputs[0], zero]))
    nodes.append(whole := onnx_ir.node("Cast", [last.outputs[0]], attributes={"to": onnx_ir.DataType.INT64}))
    first = new_initializer(graph, before - 1, f"{name}_first")
    nodes.append(place := onnx_ir.node("Add", [whole.outputs[0], first]))
    nodes.append(right := onnx_ir.node("Where", [found.outputs[0], place.outputs[0], places]))
    for position, each in enumerate(nodes):
        each.outputs[0].name = f"{name}_{position}"
    last.outputs[0].shape, last.outputs[0].type = pool.outputs[0].shape, pool.outputs[0].type
    right.outputs[0].shape, right.outputs[0].type = places.shape, places.type
    onnx_ir.convenience.replace_all_uses_with(places, right.outputs[0], replace_graph_outputs=True)
    right.replace_input_with(2, places)
    graph.insert_after(pool, nodes)


def _convolution_by_zeros(graph: Any, pool: Any, source: Any) -> Any:
    """A depthwise convolution over the windows of a pooling."""
    import onnx_ir

    kernel, channels = ints_of(pool, "kernel_shape"), _channels(pool.inputs[0])
    strides, dilations = ints_of(pool, "strides") or [1] * len(kernel), ints_of(pool, "dilations")
    dilations, begins = (
        dilations or [1] * len(kernel),
        (ints_of(pool, "pads") or [0] * len(kernel))[: len(kernel)],
    )
    ends = ends_of(pool)
    assert ends is not None
    weight = new_initializer(
        graph, np.zeros((channels, 1, *kernel), np.float32), f"{pool.outputs[0].name}_zeros"
    )
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "group": channels,
    }
    return onnx_ir.node("Conv", [source, weight], attributes={**attributes, "pads": [*begins, *ends]})


def _channels(value: Any) -> int | None:
    """The number of channels of an image, where it is fixed."""
    shape = list(value.shape) if value.shape is not None else []
    return shape[1] if len(shape) > 2 and isinstance(shape[1], int) else None


def ends_of(pool: Any) -> list[int] | None:
    """The padding behind an image with which a convolution has a pooling's windows; None: sizes decide it."""
    kernel = ints_of(pool, "kernel_shape")
    rank = len(kernel)
    strides, dilations = ints_of(pool, "strides") or [1] * rank, ints_of(pool, "dilations") or [1] * rank
    pads = ints_of(pool, "pads") or [0] * 2 * rank
    before, after = (
        (list(v.shape) if v.shape is not None else [])[2:] for v in (pool.inputs[0], pool.outputs[0])
    )
    if not all(isinstance(size, int) for size in (*before, *after)) or len(before) != rank:
        return None if flag_of(pool, "ceil_mode") else pads[rank:]
    geometry = zip(before, after, kernel, strides, dilations, pads[:rank], strict=True)
    return [max((out - 1) * s + d * (k - 1) + 1 - n - b, 0) for n, out, k, s, d, b in geometry]  # `ceil_mode`


def _fold_first_places(graph: Any, pool: Any) -> None:
    """Places of a pooling over one pixel are 0, 1, 2 and so on: what is sliced out of them is a constant."""
    shape, slices = _sizes(pool.outputs[1]), [use.node for use in pool.outputs[1].uses()]
    ones = {value for name in ("kernel_shape", "strides") for value in ints_of(pool, name)}
    if ones != {1} or any(ints_of(pool, "pads")) or not shape or pool.outputs[1].is_graph_output():
        return
    for each in slices:
        bounds = [constant_of(value) for value in each.inputs[1:]]
        if each.op_type != "Slice" or len(bounds) != 3 or any(b is None for b in bounds):
            continue
        chosen = [slice(None)] * len(shape)
        for start, stop, axis in zip(*bounds, strict=True):
            chosen[axis] = slice(start, stop)
        places = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)[tuple(chosen)]
        _replace(graph, each, new_initializer(graph, np.ascontiguousarray(places), each.outputs[0].name))


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
    flat = new_initializer(graph, np.array([1, 1, given[0]]), f"{name}_flat")
    wide = new_initializer(graph, np.array([1, 1, room[0]]), f"{name}_room")
    row = new_initializer(graph, np.array(room), f"{name}_row")
    value, index = (onnx_ir.node("Reshape", [each, flat]) for each in (numbers, spread.inputs[0]))
    pooled = onnx_ir.node(
        "MaxUnpool", [value.outputs[0], index.outputs[0], wide], attributes={"kernel_shape": [1]}
    )
    result = onnx_ir.node("Reshape", [pooled.outputs[0], row])
    nodes = [value, index, pooled, result]
    for position, each in enumerate(nodes):
        each.outputs[0].name = f"{name}_{each.op_type}_{position}"
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
    if node.op_type not in ("Add", "Sub") or (constant := constant_of(node.inputs[1])) is None:
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
    found = constant_of(value)
    return found is not None and not found.any()


def constant_of(value: Any) -> Any:
    """The array of an initializer or a constant; None for anything else."""
    import onnx_ir

    tensor = onnx_ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def _sizes(value: Any) -> list[int]:
    """The shape where it is fixed, else nothing."""
    sizes = list(value.shape) if value.shape is not None else []
    return sizes if all(isinstance(size, int) for size in sizes) else []


def ints_of(node: Any, name: str) -> list[int]:
    """An attribute of integers; empty where there is none."""
    found = node.attributes.get(name)
    return [] if found is None else list(found.as_ints())


def flag_of(node: Any, name: str) -> bool:
    """Whether an attribute is there, and is not 0."""
    found = node.attributes.get(name)
    return found is not None and bool(found.as_int())


def _text(node: Any, name: str) -> str:
    found = node.attributes.get(name)
    return "none" if found is None else str(found.as_string())


def new_initializer(graph: Any, array: Any, name: str) -> Any:
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
