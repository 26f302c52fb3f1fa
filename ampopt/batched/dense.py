"""Batched forms of what RetinaNet and FCOS of torchvision do after the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampopt.batched.suppression import beside, best_first, clipped, filled, kept_by_label

Levels = list[Tensor]


def retinanet(
    self: Any, head_outputs: dict[str, Levels], anchors: list[Levels], image_shapes: list[tuple[int, int]]
) -> list[dict[str, Tensor]]:
    """`RetinaNet.postprocess_detections` with masks, see `_detections`."""
    scores = [logits.sigmoid() for logits in head_outputs["cls_logits"]]
    codes = head_outputs["bbox_regression"]
    return _detections(self, scores, codes, anchors, image_shapes, self.box_coder.decode_single)


def fcos(
    self: Any, head_outputs: dict[str, Levels], anchors: list[Levels], image_shapes: list[tuple[int, int]]
) -> list[dict[str, Tensor]]:
    """`FCOS.postprocess_detections` with masks, see `_detections`."""
    both = zip(head_outputs["cls_logits"], head_outputs["bbox_ctrness"], strict=True)
    scores = [torch.sqrt(logits.sigmoid() * centerness.sigmoid()) for logits, centerness in both]
    codes = head_outputs["bbox_regression"]
    return _detections(self, scores, codes, anchors, image_shapes, self.box_coder.decode)


def _detections(
    self: Any,
    scores: Levels,
    codes: Levels,
    anchors: list[Levels],
    image_shapes: list[tuple[int, int]],
    decode: Callable[[Tensor, Tensor], Tensor],
) -> list[dict[str, Tensor]]:
    """The best detections of each image, filled up to a fixed number.

    `scores` and `codes` are [images, anchors, ...] of each level.

    Of each level, the scores over a threshold and the best `k` of them are taken: here the others are -inf,
    behind them, and a mask says which. All levels follow each other and are suppressed by class. Where scores
    of one level are equal, either form's order among them is that of PyTorch's `topk`, which promises none.
    """
    found = []
    for image, shape in enumerate(image_shapes):
        parts = []
        for own, code, anchor in zip(scores, codes, anchors[image], strict=True):
            flat, classes = own[image].flatten(), own.shape[-1]
            over = torch.where(flat > self.score_thresh, flat, -torch.inf)
            best, places = over.topk(min(self.topk_candidates, len(flat)))
            at = torch.div(places, classes, rounding_mode="floor")
            boxes = clipped(decode(code[image][at], anchor[at]), shape)
            parts.append((boxes, best, places % classes))
        boxes, best, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        valid = best > self.score_thresh
        kept = kept_by_label(boxes, best, labels, valid, scores[0].shape[-1], self.nms_thresh)
        first, is_kept = best_first(best, kept, self.detections_per_img)
        own_boxes, own_scores = filled(boxes[first], best[first], is_kept)
        own_labels = torch.where(is_kept, labels[first], 0)
        found.append({"boxes": own_boxes, "scores": own_scores, "labels": own_labels})
    levels = range(len(scores))
    return beside(
        found,
        **{f"scores_{level}": scores[level] for level in levels},
        **{f"codes_{level}": codes[level] for level in levels},
    )
