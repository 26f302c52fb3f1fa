"""Small detectors of torchvision whose scores are spread, so that thresholds and suppression decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

CLASSES = 5
WIDTH = 64
SIZES = {"min_size": 64, "max_size": 96}


class Pyramid(nn.Module):
    """Feature maps of some levels, by name."""

    def __init__(self, levels: int, channels: int = 8) -> None:
        super().__init__()
        self.out_channels: int | list[int] = channels
        self.first = nn.Conv2d(3, channels, 3, 4, 1)
        self.more = nn.ModuleList([nn.Conv2d(channels, channels, 3, 2, 1) for _ in range(levels - 1)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = [torch.tanh(self.first(x))]
        for layer in self.more:
            found.append(torch.tanh(layer(found[-1])))
        return {str(place): each for place, each in enumerate(found)}


def _anchors(levels: int) -> AnchorGenerator:
    return AnchorGenerator(((8, 12), (16, 24), (32, 48))[:levels], ((0.5, 1.0, 2.0),) * levels)


def _pool(levels: int, size: int) -> MultiScaleRoIAlign:
    return MultiScaleRoIAlign([str(level) for level in range(levels)], size, 2)


def _ssd(levels: int) -> nn.Module:
    boxes = DefaultBoxGenerator([[2], [2, 3], [2]][:levels], min_ratio=10, max_ratio=80)
    backbone = Pyramid(levels)
    backbone.out_channels = [8] * levels
    model: nn.Module = SSD(backbone, boxes, (64, 64), CLASSES, topk_candidates=40, detections_per_img=50)
    return model


def _of_regions(kind: Callable[..., nn.Module], levels: int, **options: Any) -> nn.Module:
    counts = {"rpn_pre_nms_top_n_test": 60, "rpn_post_nms_top_n_test": 40, "box_detections_per_img": 30}
    head, predictor = TwoMLPHead(8 * 9, WIDTH), FastRCNNPredictor(WIDTH, CLASSES)
    boxes = {"box_roi_pool": _pool(levels, 3), "box_head": head, "box_predictor": predictor}
    own = {"rpn_anchor_generator": _anchors(levels), **boxes, **counts, **SIZES, **options}
    return kind(Pyramid(levels), **own)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "ssd": _ssd,
    "faster": lambda levels: _of_regions(FasterRCNN, levels),
    "mask": lambda levels: _of_regions(
        MaskRCNN,
        levels,
        mask_roi_pool=_pool(levels, 4),
        mask_head=MaskRCNNHeads(8, (16,), 1),
        mask_predictor=MaskRCNNPredictor(16, 16, CLASSES),
    ),
    "keypoint": lambda levels: _of_regions(
        KeypointRCNN,
        levels,
        keypoint_roi_pool=_pool(levels, 4),
        keypoint_head=KeypointRCNNHeads(8, (16,)),
        keypoint_predictor=KeypointRCNNPredictor(16, num_keypoints=3),
    ),
    "retinanet": lambda levels: RetinaNet(
        Pyramid(levels),
        CLASSES,
        anchor_generator=_anchors(levels),
        topk_candidates=80,
        detections_per_img=30,
        **SIZES,
    ),
    "fcos": lambda levels: FCOS(
        Pyramid(levels, 32),
        CLASSES,
        anchor_generator=AnchorGenerator(((8,), (16,), (32,))[:levels], ((1.0,),) * levels),
        topk_candidates=80,
        detections_per_img=30,
        **SIZES,
    ),
}


def detector(kind: str, threshold: float | None = None, levels: int = 3) -> nn.Module:
    """One with random weights; `threshold` is its least score, `levels` the number of its feature maps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = KINDS[kind](levels).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std={2: 0.12, 4: 0.15}.get(parameter.dim(), 0.3))
    if threshold is not None:
        owner: Any = getattr(model, "roi_heads", model)
        owner.score_thresh = threshold
    return model


def images(count: int = 1, seed: int = 0) -> list[Tensor]:
    """Images of several sizes in pixels."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, 64, 64 + 16 * place, generator=generator) for place in range(count)]
