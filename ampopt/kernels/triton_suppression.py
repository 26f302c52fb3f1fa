"""Triton kernels of `row_suppression`; import this only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "threshold"])
def overlaps(boxes, valid, found, count, words, threshold, BLOCK: tl.constexpr):
    """Which boxes of `BLOCK` others each of 32 boxes overlaps, those behind it, as the bits of words.

    `boxes` are float32 or float64. `threshold` is the bits of a float64, as an integer: a float would come
    here in float32. Of float32, `/` is not rounded to nearest.

    A program is a row, 32 of its boxes, and a block of others. It has nothing to do where all others are
    before them, or none of the 32 is valid: what it would write is not read.

    Boxes without area overlap none: 0 / 0 is over no threshold.
    """
    row = tl.program_id(0).to(tl.int64) * count
    first, other = tl.program_id(1) * 32, tl.program_id(2) * BLOCK
    if first < other + BLOCK:
        mine = first + tl.arange(0, 32)
        inside = mine < count
        if tl.max(tl.load(valid + row + mine, mask=inside, other=0).to(tl.int32), 0) != 0:
            own = boxes + (row + mine) * 4
            a1 = tl.load(own, mask=inside, other=0.0)[:, None]
            b1 = tl.load(own + 1, mask=inside, other=0.0)[:, None]
            a2 = tl.load(own + 2, mask=inside, other=0.0)[:, None]
            b2 = tl.load(own + 3, mask=inside, other=0.0)[:, None]
            places = other + tl.arange(0, BLOCK)
            there = boxes + (row + places) * 4
            x1 = tl.load(there, mask=places < count, other=0.0)[None, :]
            y1 = tl.load(there + 1, mask=places < count, other=0.0)[None, :]
            x2 = tl.load(there + 2, mask=places < count, other=0.0)[None, :]
            y2 = tl.load(there + 3, mask=places < count, other=0.0)[None, :]
            width = tl.maximum(tl.minimum(a2, x2) - tl.maximum(a1, x1), 0.0)
            height = tl.maximum(tl.minimum(b2, y2) - tl.maximum(b1, y1), 0.0)
            shared = width * height
            area = (x2 - x1) * (y2 - y1)
            whole = (a2 - a1) * (b2 - b1) + area - shared
            ratio = tl.div_rn(shared, whole) if whole.dtype == tl.float32 else shared / whole
            over = ratio > threshold.to(tl.int64).to(tl.float64, bitcast=True).to(ratio.dtype)
            over = over & (places[None, :] > mine[:, None])
            bits = tl.reshape(over.to(tl.int32), (32, BLOCK // 32, 32)) << tl.arange(0, 32)[None, None, :]
            word = other // 32 + tl.arange(0, BLOCK // 32)
            at = (row + mine)[:, None] * words + word[None, :]
            tl.store(found + at, tl.sum(bits, 2), mask=inside[:, None] & (word < words)[None, :])


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=["count"])
def suppress(found, valid, kept, count, words, WORDS: tl.constexpr):
    """What is kept of a row: 32 boxes after another, whose own overlaps decide first, and then all behind.

    `gone` has a bit for each box of the row.
    """
    row = tl.program_id(0).to(tl.int64) * count
    bit, word = tl.arange(0, 32), tl.arange(0, WORDS)
    places = word[:, None] * 32 + bit[None, :]
    alive = tl.load(valid + row + places, mask=places < count, other=0).to(tl.int32)
    gone = ~tl.sum(alive << bit[None, :], 1)
    last = tl.max(tl.where(gone != -1, word + 1, 0), 0)
    for here in range(last):
        now = tl.sum(tl.where(word == here, gone, 0), 0)
        mine = here * 32 + bit
        start = found + (row + here * 32) * words + here
        for place in tl.static_range(32):
            behind = tl.load(start + place * words, mask=here * 32 + place < count, other=0)
            now |= tl.where(((now >> place) & 1) == 0, behind, 0)
        stays = ((now >> bit) & 1) == 0
        at = found + (row + mine)[:, None] * words + word[None, :]
        reads = stays[:, None] & (word > here)[None, :] & (word < last)[None, :]
        gone |= tl.reduce(tl.load(at, mask=reads, other=0), 0, _either)
        gone = tl.where(word == here, now, gone)
    stays = ((gone[:, None] >> bit[None, :]) & 1) == 0
    tl.store(kept + row + places, stays.to(tl.uint8), mask=places < count)
