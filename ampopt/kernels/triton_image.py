"""A Triton kernel for the convolution of an image: few channels, as the caller's memory has them.

Import this only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ampopt.kernels.triton_kernels import finish

_STEPS = ["image_step", "channel_step", "line_step", "pixel_step"]
_GEOMETRY = ["stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w"]
_SIZES = ["tiles", "height", "width", "out_width", "pixel_units", "out_units", *_STEPS, *_GEOMETRY]


@triton.jit(do_not_specialize=_SIZES)
def image_kernel(
    x, w, b, y,
    tiles, height, width, out_width, pixel_units, out_units,
    image_step, channel_step, line_step, pixel_step,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXEL_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, INNERMOST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """A matrix product of the taps of `BM` pixels of one image and of `BN` columns of weights.

    w lies in memory as [channels, KH, KW, out]. The image has any strides, `..._step` elements, and any
    dtype: it is rounded to the weight's. `INNERMOST`: the channels of the result are innermost in memory,
    else the columns of its pixels.
    """
    outs, pixels = out_units * OUT_UNIT, pixel_units * PIXEL_UNIT
    image = tl.program_id(0) // tiles
    place = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    row_ok, col_ok = place < pixels, cols < outs
    top = place // out_width * stride_h - pad_h
    left = place % out_width * stride_w - pad_w
    source = x + image * image_step + top * line_step + left * pixel_step
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, CHANNELS * KH * KW, BK):
        k = first + tl.arange(0, BK)
        k_ok = k < CHANNELS * KH * KW
        channel, down, right = k // (KH * KW), k % (KH * KW) // KW * dilation_h, k % KW * dilation_w
        line, column = top[:, None] + down[None, :], left[:, None] + right[None, :]
        inside = (line >= 0) & (line < height) & (column >= 0) & (column < width)
        places = channel * channel_step + down * line_step + right * pixel_step
        ok = inside & row_ok[:, None] & k_ok[None, :]
        a = tl.load(source[:, None] + places[None, :], mask=ok, other=0.0)
        ok = k_ok[:, None] & col_ok[None, :]
        v = tl.load(w + k[:, None] * outs + cols[None, :], mask=ok, other=0.0)
        acc = tl.dot(a.to(v.dtype), v, acc, input_precision=PRECISION)
    if INNERMOST:
        offsets = (image * pixels + place)[:, None] * outs + cols[None, :]
    else:
        offsets = image * outs * pixels + place[:, None] + (cols * pixels)[None, :]
    ok = row_ok[:, None] & col_ok[None, :]
    finish(acc, b, None, y, cols, offsets, col_ok, ok, BIAS, False, ACT, "")
