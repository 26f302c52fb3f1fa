"""Winograd convolutions in ONNX Runtime's CPU graphs: 16 multiplications for every 36, or 36 for every 144.

ONNX Runtime's convolutions in blocks of channels run at three quarters of the processor's peak, so that only
fewer multiplications can make them much faster. Those with 3x3 weights and stride 1 are replaced by a custom
operator, `cpp/onnx_ops.cpp`, which reads and writes the same blocks. Tiles of 4x4 need the fewest
multiplications, those of 2x2 fewer weights (16 numbers for every 9, not 36) and no more pixels than there are
where the image is small.

Correct because: over the real numbers F(2x2, 3x3) and F(4x4, 3x3) are the convolution (Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks", 2016). The transforms of the weights are computed in float64.
Those of the images only add and subtract for tiles of 2x2, and the rounding error is one or two times that of
a direct convolution. For 4x4 it is three times that of 2x2 with the points 0, ±5/8, ±3/2 and infinity; with
0, ±1, ±2 and infinity it would be six times. Barabasz et al., "Error Analysis and Improving the Accuracy of
Winograd Convolution for Deep Neural Networks" (2020), is on the choice of points. An infinity or NaN in an
image may turn up as NaN at neighbouring pixels that a direct convolution does not reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampopt.ort.blocked import DOMAIN, block_size
from ampopt.ort.options import SessionOptions
from ampopt.ort.own_operators import (
    ACTIVATIONS,
    OWN_DOMAIN,
    attributes,
    import_domain,
    own_library,
    threads_of,
)
from ampopt.ort.profile import named, node_seconds
from ampopt.ort.session import Array
from ampopt.ort.weights import add_weights, remove_unread

POINTS: Mapping[int, tuple[float, ...]] = {2: (0.0, 1.0, -1.0), 4: (0.0, 0.625, -0.625, 1.5, -1.5)}
"""The finite points of the transforms, by the width of a tile of the output; `winograd.h` has the same."""

TILES = tuple(POINTS)


def weight_transform(tile: int) -> Array:
    """G, of shape (tile + 2, 3) in float64: for each point its powers over the product of its differences."""
    points = np.array(POINTS[tile])
    differences = points[:, None] - points + np.eye(len(points))
    finite = points[:, None] ** np.arange(3) / differences.prod(axis=1)[:, None]
    return np.concatenate([finite, [[0.0, 0.0, 1.0]]])


def quicker_by_winograd(
    model: bytes, options: SessionOptions, arrays: Sequence[Array], tiles: Sequence[int] = TILES
) -> dict[str, int]:
    """The convolutions, named by their results, that are faster with Winograd, and with which tiles.

    `model`: as ONNX Runtime has optimized it. Each convolution is measured by itself in each way. Raises
    CompilerError or SessionError.
    """
    changed = {tile: with_winograd(model, options, tile) for tile in tiles}
    if not (names := _own_results(changed[tiles[0]])):
        return {}
    direct = node_seconds(named(model), options, arrays, library=own_library())
    ways = {
        tile: node_seconds(named(each), options, arrays, library=own_library())
        for tile, each in changed.items()
    }
    fastest = {name: min(tiles, key=lambda tile: ways[tile][name]) for name in names}
    return {name: tile for name, tile in fastest.items() if ways[tile][name] < direct[name]}


def with_winograd(model: bytes, options: SessionOptions, tiles: Mapping[str, int] | int) -> bytes:
    """The model with Winograd's algorithm for convolutions, named by their results, with tiles this wide.

    `model`: as ONNX Runtime has optimized it. One number for `tiles`: for all convolutions that it suits.
    """
    from onnx import load_from_string

    found = load_from_string(model)
    weights = {each.name: each for each in found.graph.initializer}
    replaced: dict[tuple[str, int], str] = {}
    for node in found.graph.node:
        if not _is_suited(node, weights):
            continue
        tile = tiles if isinstance(tiles, int) else tiles.get(node.output[0])
        if tile is None:
            continue
        key = (name, _) = (node.input[1], tile)
        if key not in replaced:
            array = _transformed(weights[name], tile)
            replaced[key] = add_weights(found.graph, f"{name}_winograd{tile}", array)
        node.CopyFrom(_winograd_conv(node, replaced[key], options))
    remove_unread(found.graph, {name for name, _ in replaced})
    import_domain(found)
    data: bytes = found.SerializeToString()
    return data


def transformed(weight: Array, block: int, tile: int) -> Array:
    """G g Gᵀ of weights (K, C, 3, 3), as `cpp/winograd.h` needs them: (K, (tile + 2)² C) in its order."""
    filters, channels = weight.shape[:2]
    one, positions = weight_transform(tile), (tile + 2) ** 2
    wide = np.kron(one, one) @ weight.reshape(-1, 9).astype(np.float64).T
    each = wide.astype(np.float32).reshape(positions, filters, channels).transpose(0, 2, 1)
    groups = [each[:, :, start : start + 2 * block].ravel() for start in range(0, filters, 2 * block)]
    return np.concatenate(groups).reshape(filters, positions * channels)


def _is_suited(node: Any, weights: dict[str, Any]) -> bool:
    if node.domain != DOMAIN or node.op_type != "Conv" or node.input[1] not in weights:
        return False
    has, block = attributes(node), block_size()
    filters, channels = weights[node.input[1]].dims[:2]
    return (
        list(has.get("kernel_shape", [])) == [3, 3]
        and set(has.get("strides", [1])) == set(has.get("dilations", [1])) == {1}
        and has.get("group", 1) == 1
        and has.get("auto_pad", b"NOTSET") == b"NOTSET"
        and has.get("activation", b"").decode() in ACTIVATIONS
        and filters % block == channels % block == 0
    )


def _transformed(stored: Any, tile: int) -> Array:
    """`transformed` of weights that ONNX Runtime has ordered in blocks."""
    from onnx import numpy_helper

    array, block = numpy_helper.to_array(stored), block_size()
    filters, channels = array.shape[:2]
    blocks = array.reshape(filters // block, channels // block, 3, 3, block, block)
    return transformed(blocks.transpose(0, 5, 1, 4, 2, 3).reshape(filters, channels, 3, 3), block, tile)


def _winograd_conv(node: Any, weights: str, options: SessionOptions) -> Any:
    """Our operator in the place of a convolution."""
    from onnx import helper

    has = attributes(node)
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
        threads=threads_of(options),
        **{f"pad_{side}": count for side, count in pads.items()},
    )


def _own_results(model: bytes) -> list[str]:
    from onnx import load_from_string

    nodes = load_from_string(model).graph.node
    return [node.output[0] for node in nodes if node.op_type == "WinogradConv"]
