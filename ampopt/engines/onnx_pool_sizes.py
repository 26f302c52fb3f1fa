"""Writes poolings whose sizes are rounded up with explicit paddings, where sizes are fixed.

OpenVINO divides an average by the pixels that a window has beyond the padding, too, and PyTorch by those of
image and padding. Of maxima OpenVINO and ONNX's shape inference have windows that begin beyond the image,
which PyTorch leaves out.

Correct because: with a padding to the end of PyTorch's last window, sizes rounded down are PyTorch's. A
maximum ignores a padding, as does an average that does not count it; an average that counts the model's own
padding is one over an image with zeros around it, which counts no other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ampopt.engines.onnx_pooling import ends_of, flag_of, ints_of, new_initializer


def round_sizes_down(model: Any) -> None:
    """Rewrite these poolings of an `onnx_ir.Model`, in place.

    Left alone are those with indices whose windows reach as far as a kernel beyond the image, by dilation:
    ONNX Runtime refuses such a padding, and one before the pooling would change its indices.
    """
    for node in list(model.graph):
        if node.op_type in ("MaxPool", "AveragePool") and flag_of(node, "ceil_mode"):
            _round_down(model.graph, node)


def _round_down(graph: Any, pool: Any) -> None:
    import onnx_ir

    if (ends := ends_of(pool)) is None:
        return  # sizes vary
    rank, kernel = len(ends), ints_of(pool, "kernel_shape")
    pads = ints_of(pool, "pads") or [0] * 2 * rank
    begins, none = pads[:rank], [0] * rank
    beyond = [max(end - k + 1, 0) for end, k in zip(ends, kernel, strict=True)]
    if flag_of(pool, "count_include_pad"):
        counted = [min(end, own) for end, own in zip(ends, pads[rank:], strict=True)]
        if counted != ends:
            _pad(graph, pool, begins, counted, 0.0)
            pool.attributes.add(onnx_ir.AttrInt64("count_include_pad", 0))
            begins, ends = none, [end - own for end, own in zip(ends, counted, strict=True)]
    elif any(beyond):
        if len(pool.outputs) > 1 or not pool.inputs[0].dtype.is_floating_point():
            return
        _pad(graph, pool, none, beyond, -np.inf)
        ends = [end - more for end, more in zip(ends, beyond, strict=True)]
    pool.attributes.add(onnx_ir.AttrInt64s("pads", [*begins, *ends]))
    pool.attributes.add(onnx_ir.AttrInt64("ceil_mode", 0))


def _pad(graph: Any, pool: Any, begins: Sequence[int], ends: Sequence[int], value: float) -> None:
    """Let an operator pad what a pooling reads."""
    import onnx_ir

    image, name = pool.inputs[0], f"{pool.outputs[0].name}_padded"
    amounts = new_initializer(graph, np.array([0, 0, *begins, 0, 0, *ends]), f"{name}_by")
    filling = new_initializer(graph, np.array(value, image.dtype.numpy()), f"{name}_with")
    padding = onnx_ir.node("Pad", [image, amounts, filling])
    (padded,) = padding.outputs
    padded.name, padded.type = name, image.type
    more = (0, 0, *(sum(each) for each in zip(begins, ends, strict=True)))
    sizes = zip(image.shape, more, strict=True)
    padded.shape = onnx_ir.Shape([size + extra if extra else size for size, extra in sizes])
    pool.replace_input_with(0, padded)
    graph.insert_before(pool, padding)
