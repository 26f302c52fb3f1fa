"""Small pieces of networks for the tests of tiles."""

from __future__ import annotations

import dataclasses

import torch

from ampopt.kernels.conv_tiles import Site

PLAIN = Site(
    input_shape=(1, 32, 8, 8),
    pixel=32,
    weight_shape=(64, 32, 3, 3),
    geometry=(1, 1, 1, 1, 1, 1),
    groups=1,
    dtype=torch.float16,
    bias=False,
    add=False,
    scale=False,
    act1="",
    act2="",
    tf32=False,
)
DEPTHWISE = dataclasses.replace(PLAIN, weight_shape=(32, 1, 3, 3), groups=32)
LINEAR = dataclasses.replace(PLAIN, input_shape=(2, 32), weight_shape=(64, 32), geometry=())
POINT = dataclasses.replace(
    PLAIN, input_shape=(2, 32, 1, 1), weight_shape=(64, 32, 1, 1), geometry=(1, 1, 0, 0, 1, 1)
)
