"""What torchvision's `batched_nms` keeps, for boxes that are in rows by their class: with fixed sizes.

The library has two ways: of many boxes it takes classes one by one, of few it moves each class to a place of
its own, so that boxes of two classes never meet, and takes all at once. Moving rounds the coordinates, which
may decide about an overlap near the threshold; so boxes are moved here exactly where they are there. Rows are
then suppressed alone: this is the first way as it is, and the second, because rows do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BESIDE = "_"
"""Begins the names of values that are no detections."""

_LARGE_CPU, _LARGE = 4_000, 100_000
"""Number of coordinates above which `batched_nms` in `torchvision/ops/boxes.py` takes classes one by one."""


def kept_in_rows(boxes: Tensor, valid: Tensor, first_class: int, threshold: float) -> Tensor:
    """Which boxes `batched_nms` keeps of the valid ones, bool [classes, boxes].

    `boxes`: float32 [classes, boxes, 4], in each row the best first, of `first_class` and those after it.
    `row_suppression.suppress_rows` has to be registered.
    """
    classes = torch.arange(first_class, first_class + len(boxes), device=boxes.device)
    compared = _where_compared(boxes, classes[:, None], valid)
    kept: Tensor = torch.ops.ampopt.suppress_rows(compared, valid, threshold)
    return kept


def kept_by_label(
    boxes: Tensor, scores: Tensor, labels: Tensor, valid: Tensor, classes: int, threshold: float
) -> Tensor:
    """Which boxes [boxes, 4] `batched_nms` keeps of the valid ones, bool [boxes]; labels are below `classes`.

    Where it moves them in any case, all are one row. Else every class gets a row of all boxes, its own first.
    """
    if boxes.numel() <= _large(boxes):
        order = torch.where(valid, scores, -torch.inf).sort(descending=True, stable=True)[1]
        compared = _where_compared(boxes, labels, valid)[order]
        kept = torch.ops.ampopt.suppress_rows(compared[None], valid[order][None], threshold)
        return torch.zeros_like(valid).scatter(0, order, kept[0])
    own = (labels == torch.arange(classes, device=labels.device)[:, None]) & valid
    order = torch.where(own, scores, -torch.inf).sort(dim=1, descending=True, stable=True)[1]
    compared = _where_compared(boxes, labels, valid)[order]
    kept = torch.ops.ampopt.suppress_rows(compared, own.gather(1, order), threshold)
    return torch.zeros_like(kept).scatter(1, order, kept).any(0)


def _where_compared(boxes: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """The boxes [..., 4] where `batched_nms` compares them: those of many are not moved by their labels."""
    largest = torch.where(valid[..., None], boxes, -torch.inf).amax()
    moved = boxes + (labels.to(boxes.dtype) * (largest + 1.0))[..., None]
    return torch.where(4 * valid.sum() > _large(boxes), boxes, moved)


def _large(boxes: Tensor) -> int:
    """The number of coordinates above which `batched_nms` does not move boxes."""
    return _LARGE if boxes.is_cuda else _LARGE_CPU


def best_first(scores: Tensor, kept: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The places of the best `most`, the kept ones first, by their scores, and which are kept; flat tensors.

    Of equal ones the first comes first, as in torchvision's `nms`.
    """
    order = torch.where(kept, scores, -torch.inf).sort(descending=True, stable=True)[1][:most]
    return order, kept[order]


def filled(boxes: Tensor, scores: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes [boxes, 4] and scores [boxes]: those of what is not kept are the empty box and -1."""
    return torch.where(kept[:, None], boxes, 0.0), torch.where(kept, scores, -1.0)


def beside(found: list[dict[str, Tensor]], **values: Tensor) -> list[dict[str, Tensor]]:
    """The detections with values that they were chosen by, in the first image's: `cut` leaves them out.

    So they are results of a graph, and it is verified on them, also where nothing is detected.
    """
    found[0].update({f"{BESIDE}{name}": value for name, value in values.items()})
    return found


def cut(found: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The detections of each image without those of score -1, which are the last; their number is read."""
    counts = torch.stack([(each["scores"] >= 0).sum() for each in found]).tolist()
    return [
        {name: values[:count] for name, values in each.items() if not name.startswith(BESIDE)}
        for each, count in zip(found, counts, strict=True)
    ]


def cut_lists(found: Sequence[list[Tensor]]) -> tuple[list[Tensor], ...]:
    """The same for lists of each image's boxes, scores and others, in this order."""
    boxes, scores, *others = found
    images = [{"boxes": own, "scores": best} for own, best in zip(boxes, scores, strict=True)]
    for place, other in enumerate(others):
        for image, own in zip(images, other, strict=True):
            image[str(place)] = own
    return tuple(map(list, zip(*(each.values() for each in cut(images)), strict=True)))


def wide_enough(boxes: Tensor, least: float) -> Tensor:
    """Which of the boxes [..., 4] `remove_small_boxes` keeps, bool [...]."""
    return (boxes[..., 2] - boxes[..., 0] >= least) & (boxes[..., 3] - boxes[..., 1] >= least)


def clipped(boxes: Tensor, shape: tuple[int, int]) -> Tensor:
    """The boxes [..., 4] inside an image of a height and a width in pixels, as torchvision clips them."""
    from torchvision.ops.boxes import clip_boxes_to_image

    inside: Tensor = clip_boxes_to_image(boxes, shape)
    return inside
