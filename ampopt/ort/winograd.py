"""Winograd convolutions in ONNX Runtime's CPU graphs: 16 multiplications instead of 36.

ONNX Runtime's convolutions in blocks of channels run at three quarters of the processor's peak, so that only
fewer multiplications can make them much faster. Those with 3x3 weights and stride 1 are replaced by a custom
operator, `cpp/onnx_ops.cpp`, which reads and writes the same blocks.

Correct because: over the real numbers F(2x2, 3x3) is the convolution (Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks", 2016). Its transforms of images add and subtract only, those of the weights
are computed in float64. An infinity or NaN in an image may turn up as NaN at neighbouring pixels that a
direct convolution does not reach.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ampopt.ort.blocked import DOMAIN, block_size
from ampopt.ort.options import SessionOptions
from ampopt.ort.profile import named, node_seconds
from ampopt.ort.session import Array
from ampopt.ort.weights import add_weights, remove_unread
from ampopt.system.native import library

OWN_DOMAIN = "ampopt"

ACTIVATIONS = ("", "Relu", "LeakyRelu", "Clip")
"""Activations that the operator can fuse; it identifies them by their index in this list."""

TRANSFORM = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


def winograd_library() -> Path:
    """The library of the compiled operator. Raises CompilerError."""
    return library("onnx_ops.cpp", f"BLOCK={block_size()}")


def quicker_by_winograd(model: bytes, options: SessionOptions, arrays: Sequence[Array]) -> tuple[str, ...]:
    """The convolutions, named by their results, that are faster with Winograd: measured one by one.

    `model`: as ONNX Runtime has optimized it. Raises CompilerError or SessionError.
    """
    changed = with_winograd(model, options)
    names = _own_results(changed)
    if not names:
        return ()
    before = node_seconds(named(model), options, arrays)
    after = node_seconds(named(changed), options, arrays, library=winograd_library())
    return tuple(name for name in names if after[name] < before[name])


def with_winograd(model: bytes, options: SessionOptions, names: Collection[str] | None = None) -> bytes:
    """The model with Winograd's algorithm for the convolutions `names`; None: for all possible ones.

    `model`: as ONNX Runtime has optimized it.
    """
    from onnx import helper, load_from_string

    found = load_from_string(model)
    weights = {each.name: each for each in found.graph.initializer}
    chosen = [
        node
        for node in found.graph.node
        if _is_suited(node, weights) and (names is None or node.output[0] in names)
    ]
    replaced: dict[str, str] = {}
    for node in chosen:
        name = node.input[1]
        if name not in replaced:
            replaced[name] = add_weights(found.graph, f"{name}_winograd", _transformed(weights[name]))
        node.CopyFrom(_winograd_conv(node, replaced[name], options))
    remove_unread(found.graph, replaced)
    found.opset_import.append(helper.make_opsetid(OWN_DOMAIN, 1))
    data: bytes = found.SerializeToString()
    return data


def transformed(weight: Array, block: int) -> Array:
    """G g Gᵀ of weights (K, C, 3, 3), as `cpp/winograd.h` needs them: (K, 16 C), in its own order."""
    filters, channels = weight.shape[:2]
    wide = np.kron(TRANSFORM, TRANSFORM) @ weight.reshape(-1, 9).astype(np.float64).T
    each = wide.astype(np.float32).reshape(16, filters, channels).transpose(0, 2, 1)
    groups = [each[:, :, start : start + 2 * block].ravel() for start in range(0, filters, 2 * block)]
    return np.concatenate(groups).reshape(filters, 16 * channels)


def _is_suited(node: Any, weights: dict[str, Any]) -> bool:
    if node.domain != DOMAIN or node.op_type != "Conv" or node.input[1] not in weights:
        return False
    has, block = _attributes(node), block_size()
    filters, channels = weights[node.input[1]].dims[:2]
    return (
        list(has.get("kernel_shape", [])) == [3, 3]
        and set(has.get("strides", [1])) == set(has.get("dilations", [1])) == {1}
        and has.get("group", 1) == 1
        and has.get("auto_pad", b"NOTSET") == b"NOTSET"
        and has.get("activation", b"").decode() in ACTIVATIONS
        and filters % block == channels % block == 0
    )


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def _transformed(stored: Any) -> Array:
    """`transformed` of weights that ONNX Runtime has ordered in blocks."""
    from onnx import numpy_helper

    array, block = numpy_helper.to_array(stored), block_size()
    filters, channels = array.shape[:2]
    blocks = array.reshape(filters // block, channels // block, 3, 3, block, block)
    return transformed(blocks.transpose(0, 5, 1, 4, 2, 3).reshape(filters, channels, 3, 3), block)


def _winograd_conv(node: Any, weights: str, options: SessionOptions) -> Any:
    """Our operator in the place of a convolution."""
    from onnx import helper

    has = _attributes(node)
    alpha, beta = (*has.get("activation_params", ()), 0.0, 0.0)[:2]
    pads = dict(zip(("top", "left", "bottom", "right"), has.get("pads", [0] * 4), strict=True))
    return helper.make_node(
        "WinogradConv",
        [node.input[0], weights, *node.input[2:]],
        node.output,
        name=node.name,
        domain=OWN_DOMAIN,
        activation=ACTIVATIONS.index(has.get("activation", b"").decode()),
        alpha=float(alpha),
        beta=float(beta),
        threads=options.threads or os.cpu_count() or 1,
        **{f"pad_{side}": count for side, count in pads.items()},
    )


def _own_results(model: bytes) -> list[str]:
    from onnx import load_from_string

    return [n.output[0] for n in load_from_string(model).graph.node if n.domain == OWN_DOMAIN]
