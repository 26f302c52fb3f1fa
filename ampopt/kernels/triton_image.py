"""A Triton kernel for the convolution of an image: few channels, as the caller's memory has them.

Import this only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ampopt.kernels.triton_kernels import finish

_STEPS = ["image_step", "channel_step", "line_step", "pixel_step"]
_GEOMETRY = ["stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w"]
_SIZES = ["rows_total", "height", "width", "out_width", "pixel_units", "out_units", *_STEPS, *_GEOMETRY]


@triton.jit(do_not_specialize=_SIZES)
def image_kernel(
    x, w, b, y,
    rows_total, height, width, out_width, pixel_units, out_units,
    image_step, channel_step, line_step, pixel_step,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PIXEL_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, INNERMOST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """A matrix product of pixels [rows, channels x taps] and weights; w is [out, channels, KH, KW].

    The image has any strides, `..._step` elements, and any dtype: it is rounded to the weight's. `INNERMOST`:
    the channels of the result are innermost in memory, else the columns of its pixels.
    """
    outs, pixels = out_units * OUT_UNIT, pixel_units * PIXEL_UNIT
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    row_ok, col_ok = rows < rows_total, cols < outs
    image, place = rows // pixels, rows % pixels
    top = place // out_width * stride_h - pad_h
    left = place % out_width * stride_w - pad_w
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, CHANNELS * KH * KW, BK):
        k = first + tl.arange(0, BK)
        k_ok = k < CHANNELS * KH * KW
        channel, tap = k // (KH * KW), k % (KH * KW)
        line = top[:, None] + (tap // KW * dilation_h)[None, :]
        column = left[:, None] + (tap % KW * dilation_w)[None, :]
        inside = (line >= 0) & (line < height) & (column >= 0) & (column < width)
        places = (image * image_step)[:, None] + (channel * channel_step)[None, :]
        places += line * line_step + column * pixel_step
        a = tl.load(x + places, mask=inside & row_ok[:, None] & k_ok[None, :], other=0.0)
        weights = w + cols[None, :] * (CHANNELS * KH * KW) + k[:, None]
        v = tl.load(weights, mask=k_ok[:, None] & col_ok[None, :], other=0.0)
        acc = tl.dot(a.to(v.dtype), v, acc, input_precision=PRECISION)
    if INNERMOST:
        offsets = rows[:, None] * outs + cols[None, :]
    else:
        offsets = (image * outs * pixels + place)[:, None] + (cols * pixels)[None, :]
    finish(acc, b, None, y, cols, offsets, col_ok, row_ok[:, None] & col_ok[None, :], BIAS, False, ACT, "")
