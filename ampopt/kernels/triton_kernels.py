"""Triton kernels for a convolution or linear layer with its epilogue; the channel is innermost in memory.

Import this only where Triton is installed. Every kernel computes `y = act2(act1(conv(x · s, w) + b) + z)`
with sums in float32; s, b, z, act1 and act2 may be absent. Channel counts come in units of `UNIT` channels,
the largest power of two up to 8 that divides them all: memory is then read in wide blocks, although one
compiled kernel is used for all shapes. `dense` has another unit for the channels that it writes, `OUT_UNIT`:
images have three channels, and what is made of them many.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PLACES = ["rows_total", "height", "width", "out_height", "out_width"]
_STEPS = ["stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w"]
_DENSE = [*_PLACES, "pixel_units", "in_units", "out_units", "groups", "parts", *_STEPS]
_DEPTHWISE = [*_PLACES, "pixel_units", "units", *_STEPS]
_COMBINE, _VECTOR = ["rows_total", "out_units", "parts"], ["pixel_units", "in_units", "out_units"]
"""Sizes that the kernels are not specialized for, whatever divides them; the units give the divisors."""

MOST_UNROLLED: tl.constexpr = tl.constexpr(25)
"""Number of taps of a depthwise kernel up to which all are unrolled; of larger ones, one row at a time is.

On an H100's host 11x11 taps take over 150 s to compile if all are unrolled, 9x9 12 s, 7x7 4 s, and 0.5 to
0.8 s a row at a time, with kernels 8 to 13 % slower.
"""


@triton.jit
def activate(v, KIND: tl.constexpr):
    """An activation of float32 values; NaN stays NaN."""
    if KIND == "relu":
        v = tl.where(v < 0.0, 0.0, v)
    elif KIND == "relu6":
        v = tl.where(v < 0.0, 0.0, tl.where(v > 6.0, 6.0, v))
    elif KIND == "sigmoid":
        v = 1.0 / (1.0 + tl.exp(-v))
    elif KIND == "silu":
        v = v / (1.0 + tl.exp(-v))
    elif KIND == "hardsigmoid":
        v = (v + 3.0) * 0.16666666666666666
        v = tl.where(v < 0.0, 0.0, tl.where(v > 1.0, 1.0, v))
    elif KIND == "hardswish":
        gate = (v + 3.0) * 0.16666666666666666
        v = v * tl.where(gate < 0.0, 0.0, tl.where(gate > 1.0, 1.0, gate))
    elif KIND == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        v = v / (1.0 + tl.exp(-1.5957691216057308 * (v + 0.044715 * v * v * v)))
    return v


@triton.jit
def finish(
    v, b, z, y, cols, offsets, col_ok, ok,
    BIAS: tl.constexpr, ADD: tl.constexpr, ACT1: tl.constexpr, ACT2: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to a tile [rows, columns] of sums, and store it."""
    if BIAS:
        v += tl.load(b + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    v = activate(v, ACT1)
    if ADD:
        v += tl.load(z + offsets, mask=ok, other=0.0).to(tl.float32)
        v = activate(v, ACT2)
    tl.store(y + offsets, v.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=_DENSE)
def dense(
    x, w, b, z, s, y,
    rows_total, height, width, out_height, out_width, pixel_units, in_units, out_units, groups, parts,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    KH: tl.constexpr, KW: tl.constexpr, UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACT1: tl.constexpr, ACT2: tl.constexpr,
):  # fmt: skip
    """Convolution as a matrix product of pixels [rows, taps x channels] and weights; w is [out, KH, KW, in].

    `WIDE`: a row of taps is one contiguous block of KW x channels in memory, and is read as such (few
    channels). `SPLIT`: each of the `parts` sums its share of the taps into its own float32 plane of y, see
    `combine`.
    """
    channels, outs, pixel = in_units * UNIT, out_units * OUT_UNIT, pixel_units * UNIT
    out_row = outs * groups
    group, part = tl.program_id(2) // parts, tl.program_id(2) % parts
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    row_ok, col_ok = rows < rows_total, cols < outs
    image = rows // (out_height * out_width)
    top = (rows // out_width) % out_height * stride_h - pad_h
    left = rows % out_width * stride_w - pad_w
    run = channels
    taps = KH * KW
    if WIDE:
        run = KW * channels
        taps = KH
    blocks = tl.cdiv(run, BK)
    weights = w + (group * outs + cols)[None, :] * (KH * KW * channels)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    lands = row_ok & (top >= 0) & (top < height) & (left >= 0) & (left < width)
    steps = taps * blocks
    share = tl.cdiv(steps, parts)
    for step in range(part * share, tl.minimum(steps, (part + 1) * share)):
        tap, c = step // blocks, step % blocks * BK + k
        c_ok = c < run
        if WIDE:
            line = top + tap * dilation_h
            line_ok = row_ok & (line >= 0) & (line < height)
            column = left[:, None] + (c // channels)[None, :]
            ok = line_ok[:, None] & (column >= 0) & (column < width) & c_ok[None, :]
            places = ((image * height + line) * width + left) * pixel
        elif KH * KW == 1:
            line, column = top, left
            ok = lands[:, None] & c_ok[None, :]
            places = ((image * height + line) * width + column) * pixel + group * channels
        else:
            line, column = top + tap // KW * dilation_h, left + tap % KW * dilation_w
            inside = row_ok & (line >= 0) & (line < height) & (column >= 0) & (column < width)
            ok = inside[:, None] & c_ok[None, :]
            places = ((image * height + line) * width + column) * pixel + group * channels
        a = tl.load(x + places[:, None] + c[None, :], mask=ok, other=0.0)
        if SCALE:
            factors = s + (image * channels * groups + group * channels)[:, None] + c[None, :]
            a = (a.to(tl.float32) * tl.load(factors, mask=ok, other=0.0).to(tl.float32)).to(a.dtype)
        v = tl.load(weights + tap * run + c[:, None], mask=c_ok[:, None] & col_ok[None, :], other=0.0)
        acc = tl.dot(a, v, acc, input_precision=PRECISION)
    cols += group * outs
    ok = row_ok[:, None] & col_ok[None, :]
    offsets = rows[:, None] * out_row + cols[None, :]
    if SPLIT:
        tl.store(y + part * rows_total * out_row + offsets, acc, mask=ok)
    else:
        finish(acc, b, z, y, cols, offsets, col_ok, ok, BIAS, ADD, ACT1, ACT2)


@triton.jit(do_not_specialize=_COMBINE)
def combine(
    planes, b, z, y, rows_total, out_units, parts,
    UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, ACT1: tl.constexpr, ACT2: tl.constexpr,
):  # fmt: skip
    """Sum the planes [parts, rows, columns] of `dense`, and apply the epilogue."""
    outs = out_units * UNIT
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    col_ok = cols < outs
    ok = (rows < rows_total)[:, None] & col_ok[None, :]
    offsets = rows[:, None] * outs + cols[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for part in range(parts):
        acc += tl.load(planes + part * rows_total * outs + offsets, mask=ok, other=0.0)
    finish(acc, b, z, y, cols, offsets, col_ok, ok, BIAS, ADD, ACT1, ACT2)


@triton.jit
def tap_row(
    acc, x, weights, line, left, image, row_ok, cols, col_ok,
    height, width, dilation_w, pixel, channels, KW: tl.constexpr,
):  # fmt: skip
    """Add one row of a depthwise kernel's taps to the sums of a tile [rows, channels]."""
    for j in tl.static_range(KW):
        column = left + j * dilation_w
        inside = row_ok & (line >= 0) & (line < height) & (column >= 0) & (column < width)
        places = ((image * height + line) * width + column) * pixel
        ok = inside[:, None] & col_ok[None, :]
        a = tl.load(x + places[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        v = tl.load(weights + j * channels, mask=col_ok, other=0.0).to(tl.float32)
        acc += a * v[None, :]
    return acc


@triton.jit(do_not_specialize=_DEPTHWISE)
def depthwise(
    x, w, b, z, y,
    rows_total, height, width, out_height, out_width, pixel_units, units,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    KH: tl.constexpr, KW: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, ACT1: tl.constexpr, ACT2: tl.constexpr,
):  # fmt: skip
    """Convolution of every channel by itself; w lies in memory as [KH, KW, channels]."""
    channels, pixel = units * UNIT, pixel_units * UNIT
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    row_ok, col_ok = rows < rows_total, cols < channels
    image = rows // (out_height * out_width)
    top = (rows // out_width) % out_height * stride_h - pad_h
    left = rows % out_width * stride_w - pad_w
    acc = tl.zeros((BM, BN), tl.float32)
    if KH * KW <= MOST_UNROLLED:
        for i in tl.static_range(KH):
            acc = tap_row(
                acc, x, w + i * KW * channels + cols, top + i * dilation_h, left, image, row_ok, cols, col_ok,
                height, width, dilation_w, pixel, channels, KW,
            )  # fmt: skip
    else:
        for i in range(KH):
            acc = tap_row(
                acc, x, w + i * KW * channels + cols, top + i * dilation_h, left, image, row_ok, cols, col_ok,
                height, width, dilation_w, pixel, channels, KW,
            )  # fmt: skip
    ok = row_ok[:, None] & col_ok[None, :]
    offsets = rows[:, None] * channels + cols[None, :]
    finish(acc, b, z, y, cols, offsets, col_ok, ok, BIAS, ADD, ACT1, ACT2)


@triton.jit(do_not_specialize=_VECTOR)
def vector(
    x, w, b, z, s, y, pixel_units, in_units, out_units,
    UNIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACT1: tl.constexpr, ACT2: tl.constexpr,
):  # fmt: skip
    """A matrix product for few rows: each program sums BN columns of one row; w is [out, in]."""
    channels, outs = in_units * UNIT, out_units * UNIT
    row = tl.program_id(0)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    col_ok = cols < outs
    acc = tl.zeros((BN, BK), tl.float32)
    for first in range(0, channels, BK):
        c = first + tl.arange(0, BK)
        c_ok = c < channels
        a = tl.load(x + row * pixel_units * UNIT + c, mask=c_ok, other=0.0).to(tl.float32)
        if SCALE:
            a *= tl.load(s + row * channels + c, mask=c_ok, other=0.0).to(tl.float32)
        ok = col_ok[:, None] & c_ok[None, :]
        v = tl.load(w + cols[:, None] * channels + c[None, :], mask=ok, other=0.0).to(tl.float32)
        acc += v * a[None, :]
    total = tl.sum(acc, 1)[None, :]
    finish(total, b, z, y, cols, (row * outs + cols)[None, :], col_ok, col_ok[None, :], BIAS, ADD, ACT1, ACT2)
