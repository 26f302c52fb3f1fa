"""The memory layout of feature maps with the channel innermost, as Triton kernels read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def unit_of(*counts: int) -> int:
    """The largest power of two up to 8 that divides all counts."""
    return math.gcd(8, *counts)


def reads_runs(channels: int, taps: Sequence[int], groups: int, pixel: int, geometry: Sequence[int]) -> bool:
    """Whether a row of taps is read as one contiguous block: few channels, and no gaps in memory."""
    return channels < 16 and taps[1] > 1 and groups == 1 and pixel == channels and geometry[5] == 1


def result_size(size: Sequence[int], taps: Sequence[int], geometry: Sequence[int]) -> list[int]:
    """Height and width of a convolution's result for an image of this height and width.

    `geometry` holds stride, padding and dilation, two numbers each.
    """
    stride, padding, dilation = geometry[:2], geometry[2:4], geometry[4:]
    return [(size[d] + 2 * padding[d] - dilation[d] * (taps[d] - 1) - 1) // stride[d] + 1 for d in (0, 1)]


def pixel_stride(shape: Sequence[int], strides: Sequence[int], *, is_image: bool) -> int | None:
    """The number of elements from one pixel (or row) of a tensor to the next, if this distance is constant.

    None if it is not, so that the tensor must be copied first. A slice of channels has one. The channels are
    dimension 1 of an image [batch, channels, height, width], else the last one.
    """
    sizes, steps = list(shape), list(strides)
    if is_image:
        sizes, steps = [shape[0], *shape[2:], shape[1]], [strides[0], *strides[2:], strides[1]]
    if sizes[-1] != 1 and steps[-1] != 1:
        return None
    pixel: int | None = None
    rows = 1
    for size, step in zip(reversed(sizes[:-1]), reversed(steps[:-1]), strict=True):
        if size == 1:
            continue
        if pixel is None:
            pixel = step
        if step != pixel * rows:
            return None
        rows *= size
    return sizes[-1] if pixel is None else pixel if pixel >= sizes[-1] else None


def pixels(x: Tensor, *, is_image: bool) -> tuple[Tensor, int]:
    """A tensor that the kernels can read, and its `pixel_stride`; a copy if the tensor has none."""
    pixel = pixel_stride(x.shape, x.stride(), is_image=is_image)
    if pixel is not None:
        return x, pixel
    return in_order(x, is_image=is_image), x.shape[1 if is_image else -1]


def in_order(x: Tensor, *, is_image: bool) -> Tensor:
    """The tensor with channels innermost and no gaps between pixels; unchanged if it is so already."""
    return x.contiguous(memory_format=torch.channels_last if is_image else torch.contiguous_format)


def packed_depthwise(weight: Tensor) -> Tensor:
    """A depthwise weight [channels, 1, KH, KW] stored as [KH, KW, channels]; unchanged if already so."""
    order = weight.permute(2, 3, 1, 0)
    return weight if order.is_contiguous() else order.contiguous().permute(3, 2, 0, 1)
