"""Triton kernel of `row_suppression`; import this only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "threshold"])
def suppress(boxes, valid, kept, count, threshold, BLOCK: tl.constexpr):
    """A program is a row of `count` boxes, in registers; each that is alive suppresses those behind it.

    Boxes without area overlap none: 0 / 0 is over no threshold.
    """
    places = tl.arange(0, BLOCK)
    inside = places < count
    row = tl.program_id(0).to(tl.int64) * count
    own = boxes + (row + places) * 4
    x1 = tl.load(own, mask=inside, other=0.0)
    y1 = tl.load(own + 1, mask=inside, other=0.0)
    x2 = tl.load(own + 2, mask=inside, other=0.0)
    y2 = tl.load(own + 3, mask=inside, other=0.0)
    area = (x2 - x1) * (y2 - y1)
    alive = tl.load(valid + row + places, mask=inside, other=0).to(tl.int32)
    last = tl.max(tl.where(alive != 0, places + 1, 0), 0)
    for place in range(last):
        if tl.max(tl.where(places == place, alive, 0), 0) != 0:
            here = boxes + (row + place) * 4
            a1 = tl.load(here)
            b1 = tl.load(here + 1)
            a2 = tl.load(here + 2)
            b2 = tl.load(here + 3)
            width = tl.maximum(tl.minimum(a2, x2) - tl.maximum(a1, x1), 0.0)
            height = tl.maximum(tl.minimum(b2, y2) - tl.maximum(b1, y1), 0.0)
            shared = width * height
            over = tl.div_rn(shared, (a2 - a1) * (b2 - b1) + area - shared) > threshold
            alive = tl.where((places > place) & over, 0, alive)
    tl.store(kept + row + places, alive.to(tl.uint8), mask=inside)
