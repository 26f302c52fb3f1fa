"""`ampopt::suppress_rows`: non-maximum suppression in many rows of boxes at once, as one operator.

The operator of torchvision takes one set of boxes, and the host waits for the number of those it keeps. This
one takes a set a row, keeps all sizes, and waits for nothing, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ampopt.kernels.fused_conv import is_available
from ampopt.system.once import once

MOST_BOXES = 8192
"""Number of boxes in a row up to which the kernel in Triton holds a bit of each in registers."""

MOST_BYTES = 1 << 28
"""Memory that the kernels may take for the overlaps of boxes; of more rows, some are suppressed at a time."""

_BLOCK = 128
"""Boxes that 32 others are compared with by one program."""


@once
def suppress_rows() -> torch._ops.OpOverload:
    """The operator; registered with PyTorch at the first call.

    `boxes` are floating-point [rows, boxes, 4], (x1, y1, x2, y2), in each row the best first; `valid` is bool
    [rows, boxes]. Gives which are kept, bool [rows, boxes]: the valid ones whose intersection over union with
    every better one that is kept is at most `threshold`, a float.
    """
    made = torch.library.custom_op(
        "ampopt::suppress_rows",
        _compute,
        mutates_args=(),
        schema="(Tensor boxes, Tensor valid, float threshold) -> Tensor",
    )
    made.register_fake(lambda _boxes, valid, _threshold: torch.empty_like(valid))
    overload: torch._ops.OpOverload = torch.ops.ampopt.suppress_rows.default
    return overload


def _compute(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    if boxes.dtype in (torch.float16, torch.bfloat16):
        boxes = boxes.float()  # as torchvision does it under autocast
    fits = boxes.is_cuda and 0 < boxes.shape[1] <= MOST_BOXES
    if fits and len(boxes) and is_available():
        return _by_triton(boxes, valid, threshold)
    if not boxes.is_cuda and hasattr(torch.ops.torchvision, "nms"):
        return _row_by_row(boxes, valid, threshold)
    return reference(boxes, valid, threshold)


def _row_by_row(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    kept = torch.zeros_like(valid)
    order = torch.arange(valid.shape[1], 0, -1, dtype=boxes.dtype, device=boxes.device)
    for own, mine, is_kept in zip(boxes, valid, kept, strict=True):
        places = mine.nonzero()[:, 0]
        if len(places):
            is_kept[places[torch.ops.torchvision.nms(own[places], order[: len(places)], threshold)]] = True
    return kept


def _by_triton(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    from ampopt.kernels.triton_suppression import overlaps, suppress

    rows, count = valid.shape
    words = (count + 31) // 32
    most = max(1, MOST_BYTES // (4 * count * words))
    (bits,) = struct.unpack("q", struct.pack("d", threshold))
    kept = torch.empty_like(valid, memory_format=torch.contiguous_format)
    found = torch.empty(min(rows, most), count, words, dtype=torch.int32, device=boxes.device)
    with torch.cuda.device(boxes.device):
        for first in range(0, rows, most):
            given = valid[first : first + most].contiguous().view(torch.uint8)
            grid = len(given), words, (count + _BLOCK - 1) // _BLOCK
            own = boxes[first : first + most].contiguous()
            overlaps[grid](own, given, found, count, words, bits, BLOCK=_BLOCK)
            result = kept[first : first + most].view(torch.uint8)
            whole = 1 << (words - 1).bit_length()
            warps = max(1, whole // 32)
            suppress[grid[:1]](found, given, result, count, words, WORDS=whole, num_warps=warps)
    return kept


def reference(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """The operator computed by PyTorch's operators: one step for each place in a row, for all rows."""
    count = valid.shape[1]
    x1, y1, x2, y2 = boxes.unbind(2)
    area = (x2 - x1) * (y2 - y1)
    kept = valid.clone()
    for place in range(count - 1):
        here, rest = slice(place, place + 1), slice(place + 1, count)
        width = torch.minimum(x2[:, here], x2[:, rest]) - torch.maximum(x1[:, here], x1[:, rest])
        height = torch.minimum(y2[:, here], y2[:, rest]) - torch.maximum(y1[:, here], y1[:, rest])
        shared = width.clamp(min=0) * height.clamp(min=0)
        overlaps = shared / (area[:, here] + area[:, rest] - shared) > threshold
        kept[:, rest] &= ~(overlaps & kept[:, here])
    return kept
