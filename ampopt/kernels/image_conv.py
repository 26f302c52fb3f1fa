"""`ampopt::image_conv`: the convolution of an image in the caller's dtype and layout, as one operator.

It computes `act(conv(x, w) + b)` in the weight's dtype. Its result has the dtype and the layout in which it
is wanted, so that nothing is converted before or after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.kernels.fused_conv import ACTIVATIONS, Tile
from ampopt.kernels.pixel_layout import result_size, unit_of
from ampopt.system.once import once

LARGEST_OFFSET = 2**31
"""The kernel counts elements in 32 bits."""

_LARGE, _SMALL = (128, 64), (64, 32)
"""(pixels, channels) of a tile.

The large ones win where many of them fill the device (`benchmarks/results/h200/image_conv.json`), the small
ones where few do, as for the patches of one image.
"""

_LEAST_DEEP, MOST_DEEP = 16, 64
"""`tl.dot` takes blocks of 16 numbers and more; one of this many fits beside a tile of sums in registers.

Filters of more are left to cuDNN. The kernel would read them block by block, which was slower wherever it was
timed: a stem of 7x7 taps took 20 µs for one image of 224x224, cuDNN 15 with all conversions.
"""


@once
def image_conv() -> torch._ops.OpOverload:
    """The operator; registered with PyTorch at the first call.

    `x` is [batch, channels, height, width] of any floating-point dtype and any strides; `w`, `b` are float32,
    float16 or bfloat16. `geometry` holds stride, padding and dilation, two numbers each. The result has
    `dtype`, and its channels innermost in memory with `innermost`, else PyTorch's usual layout.
    """
    made = torch.library.custom_op(
        "ampopt::image_conv",
        _compute,
        mutates_args=(),
        schema="(Tensor x, Tensor w, Tensor? b, int[] geometry, str act, ScalarType dtype, bool innermost, "
        "str tile) -> Tensor",
    )
    made.register_fake(_empty_result)
    overload: torch._ops.OpOverload = torch.ops.ampopt.image_conv.default
    return overload


def reference(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    geometry: Sequence[int],
    act: str,
    dtype: torch.dtype,
    innermost: bool,
) -> Tensor:
    """The operator computed by PyTorch's operators, one after another."""
    y = ACTIVATIONS[act](F.conv2d(x.to(w.dtype), w, b, geometry[:2], geometry[2:4], geometry[4:]))
    return y.to(dtype).contiguous(memory_format=_layout(innermost))


def _layout(innermost: bool) -> torch.memory_format:
    return torch.channels_last if innermost else torch.contiguous_format


def _empty_result(x: Tensor, w: Tensor, *arguments: Any) -> Tensor:
    geometry, dtype, innermost = arguments[1], arguments[3], arguments[4]
    shape = (x.shape[0], w.shape[0], *result_size(x.shape[2:], w.shape[2:], geometry))
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=_layout(innermost))


def packed(weight: Tensor) -> Tensor:
    """A weight [out, channels, KH, KW] stored as [channels, KH, KW, out]; unchanged if it is so already."""
    order = weight.permute(1, 2, 3, 0)
    return weight if order.is_contiguous() else order.contiguous().permute(3, 0, 1, 2)


def tiles_for(pixels: int, weight: Tensor, *, tf32: bool) -> list[Tile]:
    """The tiles to time for images whose results have so many pixels, the likeliest first.

    Its filters, `weight` [out, channels, KH, KW], hold at most `MOST_DEEP` numbers.
    """
    outs, deep = weight.shape[0], math.prod(weight.shape[1:])
    depth = max(_LEAST_DEEP, 1 << (deep - 1).bit_length())
    precision = "tf32" if tf32 and weight.dtype is torch.float32 else "ieee"
    sizes = zip((pixels, outs), _LARGE, _SMALL, strict=True)
    fitted = tuple(large if size > small else small for size, large, small in sizes)
    return [
        Tile("image", rows, cols, depth, precision=precision)
        for rows, cols in dict.fromkeys((fitted, _SMALL))
    ]


def _compute(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    geometry: Sequence[int],
    act: str,
    dtype: torch.dtype,
    innermost: bool,
    tile: str,
) -> Tensor:
    from ampopt.kernels.triton_image import image_kernel

    how, y = Tile.parse(tile), _empty_result(x, w, b, geometry, act, dtype, innermost)
    outs, pixels = w.shape[0], math.prod(y.shape[2:])
    tiles = -(-pixels // how.rows)
    pixel_unit, out_unit = unit_of(pixels), unit_of(outs)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        image_kernel[y.shape[0] * tiles, -(-outs // how.cols)](
            *(x, packed(w), None if b is None else b.contiguous(), y),
            *(tiles, *x.shape[2:], y.shape[3], pixels // pixel_unit, outs // out_unit),
            *(*x.stride(), *geometry),
            CHANNELS=w.shape[1],
            KH=w.shape[2],
            KW=w.shape[3],
            PIXEL_UNIT=pixel_unit,
            OUT_UNIT=out_unit,
            INNERMOST=innermost,
            BM=how.rows,
            BN=how.cols,
            BK=how.depth,
            PRECISION=how.precision,
            BIAS=b is not None,
            ACT=act,
            num_warps=how.warps,
            num_stages=how.stages,
        )
    return y
