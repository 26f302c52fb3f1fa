"""Winograd convolutions in ONNX Runtime's CPU graphs: 16 multiplications for every 36, or 36 for every 144.

ONNX Runtime's convolutions in blocks of channels run at three quarters of the processor's peak, so that only
fewer multiplications can make them much faster. Those with 3x3 weights and stride 1 are replaced by a custom
operator, `cpp/winograd.h`, which reads and writes the same blocks. Tiles of 4x4 need the fewest
multiplications, those of 2x2 fewer weights (16 numbers for every 9, not 36) and no more pixels than there are
where the image is small.

Correct because: over the real numbers F(2x2, 3x3) and F(4x4, 3x3) are the convolution (Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks", 2016). The transforms of the weights are computed in float64.
Those of the images only add and subtract for tiles of 2x2, and the rounding error is one or two times that of
a direct convolution. For 4x4 it is three times that of 2x2 with the points 0, ±5/8, ±3/2 and infinity; with
0, ±1, ±2 and infinity it would be six times. Barabasz et al., "Error Analysis and Improving the Accuracy of
Winograd Convolution for Deep Neural Networks" (2020), is on the choice of points. An infinity or NaN in an
image may turn up as NaN at neighbouring pixels that a direct convolution does not reach, unless the operator
has the weights themselves: then it computes anew what is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ampopt.ort.blocked import block_size
from ampopt.ort.session import Array

POINTS: Mapping[int, tuple[float, ...]] = {2: (0.0, 1.0, -1.0), 4: (0.0, 0.625, -0.625, 1.5, -1.5)}
"""The finite points of the transforms, by the width of a tile of the output; `winograd.h` has the same."""

TILES = tuple(POINTS)


def weight_transform(tile: int) -> Array:
    """G, of shape (tile + 2, 3) in float64: for each point its powers over the product of its differences."""
    points = np.array(POINTS[tile])
    differences = points[:, None] - points + np.eye(len(points))
    finite = points[:, None] ** np.arange(3) / differences.prod(axis=1)[:, None]
    return np.concatenate([finite, [[0.0, 0.0, 1.0]]])


def transformed(weight: Array, block: int, tile: int) -> Array:
    """G g Gᵀ of weights (K, C, 3, 3), as `cpp/winograd.h` needs them: (K, (tile + 2)² C) in its order."""
    filters, channels = weight.shape[:2]
    one, positions = weight_transform(tile), (tile + 2) ** 2
    wide = np.kron(one, one) @ weight.reshape(-1, 9).astype(np.float64).T
    each = wide.astype(np.float32).reshape(positions, filters, channels).transpose(0, 2, 1)
    groups = [each[:, :, start : start + 2 * block].ravel() for start in range(0, filters, 2 * block)]
    return np.concatenate(groups).reshape(filters, positions * channels)


def suits(has: Mapping[str, Any], _weight: Array) -> bool:
    """Whether a blocked convolution with 3x3 weights can be computed so, by its attributes."""
    return set(has.get("strides", [1])) == {1} and has.get("group", 1) == 1


def rearranged(weight: Array, tile: int) -> Array:
    """`transformed` of weights that ONNX Runtime has ordered in blocks."""
    block = block_size()
    filters, channels = weight.shape[:2]
    blocks = weight.reshape(filters // block, channels // block, 3, 3, block, block)
    return transformed(blocks.transpose(0, 5, 1, 4, 2, 3).reshape(filters, channels, 3, 3), block, tile)
