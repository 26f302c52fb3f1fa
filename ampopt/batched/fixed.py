"""Detectors of torchvision as one graph of fixed sizes; results are cut to their numbers after it.

With batched loops that fill up to fixed numbers, a detector from its images to its detections is tensors and
nothing else: it is captured as one graph. What fills up has a score of -1. The numbers are read once, after
the graph; masks and keypoints are computed then, for the detections that there are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.batched import keypoints
from ampopt.batched.suppression import beside, cut

Sizes = list[tuple[int, int]]

_HEADS = (
    *("mask_roi_pool", "mask_head", "mask_predictor"),
    *("keypoint_roi_pool", "keypoint_head", "keypoint_predictor"),
)
"""The parts of `RoIHeads` that work on detections."""


class Cut(nn.Module):
    """A detector's graph, and the cut of its results; other attributes are those of the detector."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph: Any = graph

    def forward(self, *args: Any, **kwargs: Any) -> list[dict[str, Tensor]]:
        """The detections of each image, as the detector gives them."""
        return cut(self.graph(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        if name.startswith("__") or "graph" not in modules:  # how it is copied is its own
            raise AttributeError(name)
        return getattr(modules["graph"], name)


class CutForHeads(Cut):
    """A graph to the detections, the cut, and the heads that work on them."""

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        self.heads: Any = nn.Module()
        for part in _HEADS:
            setattr(self.heads, part, getattr(graph.roi_heads, part))
            setattr(graph.roi_heads, part, None)

    def forward(self, *args: Any, **kwargs: Any) -> list[dict[str, Tensor]]:
        """The detections of each image, with their masks and keypoints, as `RoIHeads` computes them."""
        from torchvision.models.detection.roi_heads import maskrcnn_inference

        padded, features, sizes, original_sizes = self.graph(*args, **kwargs)
        found, own = cut(padded), self.heads
        boxes = [each["boxes"] for each in found]
        if own.mask_predictor is not None:
            logits = own.mask_predictor(own.mask_head(own.mask_roi_pool(features, boxes, sizes)))
            masks = maskrcnn_inference(logits, [each["labels"] for each in found])
            for each, mask in zip(found, masks, strict=True):
                each["masks"] = mask
        if own.keypoint_predictor is not None:
            logits = own.keypoint_predictor(own.keypoint_head(own.keypoint_roi_pool(features, boxes, sizes)))
            both = zip(*keypoints.found_in(logits, boxes), strict=True)
            for each, (points, scores) in zip(found, both, strict=True):
                each["keypoints"], each["keypoints_scores"] = points, scores
        result: list[dict[str, Tensor]] = self.graph.transform.postprocess(found, sizes, original_sizes)
        return result


def detected(
    self: Any, images: list[Tensor], targets: Any = None
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], Sizes, Sizes]:
    """`GeneralizedRCNN.forward` up to the heads that work on detections.

    Returns also the features, and the sizes of the images that those are of, and of the given ones, in
    pixels. Beside the detections are the heads' values; of the second, which follow the order of proposals,
    what has no order: see `_sizes_over_rows`.
    """
    from torchvision.models.detection.rpn import concat_box_prediction_layers

    given = [(image.shape[-2], image.shape[-1]) for image in images]
    batch, _ = self.transform(images, targets)
    sizes, features = batch.image_sizes, self.backbone(batch.tensors)
    if isinstance(features, Tensor):
        features = OrderedDict([("0", features)])
    rpn, heads, levels = self.rpn, self.roi_heads, list(features.values())
    objectness, deltas = rpn.head(levels)
    anchors = rpn.anchor_generator(batch, levels)
    counts = [each[0].numel() for each in objectness]
    objectness, deltas = concat_box_prediction_layers(objectness, deltas)
    boxes = rpn.box_coder.decode(deltas, anchors).view(len(images), -1, 4)
    proposals, _ = rpn.filter_proposals(boxes, objectness, sizes, counts)
    logits, codes = heads.box_predictor(heads.box_head(heads.box_roi_pool(features, proposals, sizes)))
    rows = zip(*heads.postprocess_detections(logits, codes, proposals, sizes), strict=True)
    found = [{"boxes": own, "labels": label, "scores": best} for own, best, label in rows]
    second = {"logits": _sizes_over_rows(logits), "codes": _sizes_over_rows(codes)}
    return beside(found, objectness=objectness, deltas=deltas, **second), features, sizes, given


def _sizes_over_rows(values: Tensor) -> Tensor:
    """The norms of positive and of negative values in each column of [rows, columns], [2, columns].

    Rounding changes the order of rows, and not these. Of a sum, it would change much where values cancel out.
    """
    return torch.stack([part.clamp(min=0).square().sum(0).sqrt() for part in (values, -values)])


def detections(self: Any, images: list[Tensor], targets: Any = None) -> list[dict[str, Tensor]]:
    """`GeneralizedRCNN.forward` of a detector without such heads."""
    found, _, sizes, given = detected(self, images, targets)
    result: list[dict[str, Tensor]] = self.transform.postprocess(found, sizes, given)
    return result


def move_anchors(model: nn.Module) -> None:
    """Move the anchors of torchvision's `AnchorGenerator`s to the weights, as their first call would do."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    device = next(model.parameters()).device
    for module in model.modules():
        if isinstance(module, AnchorGenerator):
            module.cell_anchors = [anchors.to(device) for anchors in module.cell_anchors]
