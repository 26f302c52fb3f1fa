"""Batched forms of what Faster, Mask and Keypoint R-CNN of torchvision do between their networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.batched.suppression import best_first, clipped, filled, kept_in_rows, wide_enough

_LEAST_SIDE = 1e-2
"""Side in pixels below which `RoIHeads` drops a box."""


def proposals(
    self: Any,
    proposals: Tensor,
    objectness: Tensor,
    image_shapes: list[tuple[int, int]],
    num_anchors_per_level: list[int],
) -> tuple[list[Tensor], list[Tensor]]:
    """`RegionProposalNetwork.filter_proposals` with masks; rows are the levels.

    The best of each level are taken by the same calls of `topk`, so that they come in the same order. What is
    removed there (small boxes, low scores) is not valid here. Shorter levels are filled up with what is not
    valid either, and so behind all others in the last order; so are the proposals, up to a fixed number: a
    box without a side gives no detection, because it has none either when it is decoded.
    """
    objectness = objectness.detach().reshape(proposals.shape[0], -1)
    counts = [min(self.pre_nms_top_n(), count) for count in num_anchors_per_level]
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    scores_of, boxes_of = (
        objectness.split(num_anchors_per_level, 1),
        proposals.split(num_anchors_per_level, 1),
    )
    for own, boxes, count in zip(scores_of, boxes_of, counts, strict=True):
        best, places = own.topk(count, dim=1)
        at = boxes.gather(1, places[..., None].expand(-1, -1, 4))
        end = max(counts) - count
        inside = F.pad(torch.ones_like(best, dtype=torch.bool), (0, end))
        rows.append((F.pad(at, (0, 0, 0, end)), F.pad(best.sigmoid(), (0, end)), inside))
    boxes, scores, inside = (torch.stack(each, 1) for each in zip(*rows, strict=True))
    found = [_best_proposals(self, *each) for each in zip(boxes, scores, inside, image_shapes, strict=True)]
    return [own for own, _ in found], [best for _, best in found]


def _best_proposals(
    self: Any, boxes: Tensor, scores: Tensor, inside: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Boxes and scores of an image's best proposals."""
    boxes = clipped(boxes, shape)
    valid = inside & wide_enough(boxes, self.min_size) & (scores >= self.score_thresh)
    kept = kept_in_rows(boxes, valid, 0, self.nms_thresh)
    first, is_kept = best_first(scores.flatten(), kept.flatten(), self.post_nms_top_n())
    return filled(boxes.flatten(0, 1)[first], scores.flatten()[first], is_kept)


def detections(
    self: Any,
    class_logits: Tensor,
    box_regression: Tensor,
    proposals: list[Tensor],
    image_shapes: list[tuple[int, int]],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """`RoIHeads.postprocess_detections` with masks; rows are the classes.

    Within a class the order is that of `nms`: by score, of equal ones the earlier proposal first. The last
    order is over proposals, and classes within them, as there. Filled up to a fixed number.
    """
    sizes = [len(each) for each in proposals]
    boxes = self.box_coder.decode(box_regression, proposals).split(sizes, 0)
    scores = F.softmax(class_logits, -1).split(sizes, 0)
    found = [_best_detections(self, *each) for each in zip(boxes, scores, image_shapes, strict=True)]
    return [own for own, _, _ in found], [best for _, best, _ in found], [label for _, _, label in found]


def _best_detections(
    self: Any, boxes: Tensor, scores: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes, scores and labels of an image's best detections."""
    boxes, scores = clipped(boxes, shape)[:, 1:], scores[:, 1:]
    classes = scores.shape[1]
    if not len(boxes):
        return boxes.reshape(0, 4), scores.reshape(0), scores.new_zeros(0, dtype=torch.int64)
    valid = ((scores > self.score_thresh) & wide_enough(boxes, _LEAST_SIDE)).t()
    order = torch.where(valid, scores.t(), -torch.inf).sort(dim=1, descending=True, stable=True)[1]
    rows = boxes.transpose(0, 1).gather(1, order[..., None].expand(-1, -1, 4))
    kept = kept_in_rows(rows, valid.gather(1, order), 1, self.nms_thresh)
    kept = torch.zeros_like(kept).scatter(1, order, kept).t().flatten()
    first, is_kept = best_first(scores.flatten(), kept, self.detections_per_img)
    own, best = filled(boxes.reshape(-1, 4)[first], scores.flatten()[first], is_kept)
    return own, best, torch.where(is_kept, first % classes + 1, 0)


def pooled(
    self: Any, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
) -> Tensor:
    """`MultiScaleRoIAlign.forward`, where every level pools all boxes, and each box takes its own level's.

    Scales of the levels that no call has set yet are those of this call, and are not kept: a graph has no
    state.
    """
    from torchvision.ops import poolers

    features = poolers._filter_input(x, self.featmap_names)
    scales, map_levels = self.scales, self.map_levels
    if scales is None or map_levels is None:
        own = features, image_shapes, self.canonical_scale, self.canonical_level
        scales, map_levels = poolers._setup_scales(*own)
    rois = poolers._convert_to_roi_format(boxes)
    levels = map_levels(boxes)[:, None, None, None]
    result = torch.empty(0)
    for level, (feature, scale) in enumerate(zip(features, scales, strict=True)):
        own = poolers.roi_align(feature, rois, self.output_size, scale, self.sampling_ratio)
        result = torch.where(levels == level, own.to(result.dtype), result) if level else own
    return result
