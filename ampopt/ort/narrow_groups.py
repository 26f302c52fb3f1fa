"""3x3 convolutions in ONNX Runtime's CPU graphs whose groups are narrower than a block of channels.

ONNX Runtime computes groups of 4 or 8 channels in blocks of 16 only if they are merged (`groups`), with zeros
between them: 4 or 2 products for every one that counts. A custom operator, `cpp/narrow.h`, reads and writes
the same blocks and leaves these products out: on an EPYC with AVX-512 groups of 8 channels take half of the
time, groups of 4 a quarter (the operator by itself, not in the committed results).

Correct because: a product with a weight of zero adds nothing to a sum of finite numbers. What the narrow
groups are is read from the weights themselves, of which all others are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ampopt.ort.blocked import block_size
from ampopt.ort.session import Array

WIDTHS = (2, 4, 8)
"""Channels of the groups that the operator can compute, narrower than a block."""


def suits(has: Mapping[str, Any], weight: Array) -> bool:
    """Whether a blocked convolution with 3x3 weights can be computed so, by its attributes and weights."""
    block = block_size()
    strides, groups = has.get("strides", [1, 1]), has.get("group", 1)
    if len(set(strides)) > 1 or strides[0] > 2 or weight.shape[0] != groups * block:
        return False
    return weight.shape[1] == block and width_of(weight) is not None


def width_of(weight: Array) -> int | None:
    """The least width of groups outside of which all weights are zero; None if that is a whole block.

    `weight`: (K, B, 3, 3) as ONNX Runtime orders it for blocks of B: (K / B, 3, 3, B of the input, B of the
    output).
    """
    block = block_size()
    lanes = np.arange(block)
    used = np.abs(weight).reshape(-1, block, block).max(axis=0) > 0
    fitting = (width for width in WIDTHS if width < block)
    others = ((width, lanes[:, None] // width != lanes // width) for width in fitting)
    return next((width for width, outside in others if not used[outside].any()), None)


def rearranged(weight: Array) -> Array:
    """The weights inside the groups, of width G: (K, 9 G), in the order (K / B, 9, G, B of the output)."""
    block, width = block_size(), width_of(weight)
    assert width is not None  # it suits
    lanes = np.arange(block)
    blocks = weight.reshape(-1, 9, block, block)
    inside = lanes // width * width + np.arange(width)[:, None]
    return blocks[:, :, inside, lanes].reshape(weight.shape[0], 9 * width)
