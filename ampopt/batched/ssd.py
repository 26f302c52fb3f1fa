"""The batched form of what SSD and SSDLite of torchvision do after the network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.batched.suppression import beside, best_first, clipped, filled, kept_in_rows


def detections(
    self: Any,
    head_outputs: dict[str, Tensor],
    image_anchors: list[Tensor],
    image_shapes: list[tuple[int, int]],
) -> list[dict[str, Tensor]]:
    """`SSD.postprocess_detections` with all classes at once, filled up to a fixed number of detections.

    The loop takes, of each class, the scores over a threshold, the best `k` of them, and their boxes; of
    those together it suppresses by class, and takes the best. Here scores that are not over the threshold are
    -inf, behind all others, so that the best `k` of a row begin with the same ones in the same order, and a
    mask says which. Rows follow each other as the classes' boxes do in the loop. Where scores of one class
    are equal, either form's order among them is that of PyTorch's `topk`, which promises none.
    """
    scores = F.softmax(head_outputs["cls_logits"], dim=-1)
    codes = head_outputs["bbox_regression"]
    found = [_best(self, *each) for each in zip(codes, scores, image_anchors, image_shapes, strict=True)]
    return beside(found, logits=head_outputs["cls_logits"], codes=codes)


def _best(
    self: Any, codes: Tensor, scores: Tensor, anchors: Tensor, shape: tuple[int, int]
) -> dict[str, Tensor]:
    boxes = clipped(self.box_coder.decode_single(codes, anchors), shape)
    by_class = scores[:, 1:].t()
    count = min(self.topk_candidates, boxes.shape[0])
    best, places = torch.where(by_class > self.score_thresh, by_class, -torch.inf).topk(count, dim=1)
    valid = best > self.score_thresh
    candidates = boxes[places]
    kept = kept_in_rows(candidates, valid, 1, self.nms_thresh)
    first, is_kept = best_first(best.flatten(), kept.flatten(), self.detections_per_img)
    own, scores = filled(candidates.flatten(0, 1)[first], best.flatten()[first], is_kept)
    labels = torch.div(first, count, rounding_mode="floor") + 1
    return {"boxes": own, "scores": scores, "labels": torch.where(is_kept, labels, 0)}
