"""Subjects of no package, as robots have them: state, decisions by values, and writes to what is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 128

Made = tuple[nn.Module, tuple[tuple[int, ...], ...]]
"""A model, and the shapes of its inputs."""


def _stage(inner: int, outer: int, stride: int = 2) -> nn.Sequential:
    conv = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer), nn.SiLU())


def _backbone(channels: int) -> nn.Sequential:
    """An image to a map of an eighth of its sides."""
    return nn.Sequential(_stage(3, 32), _stage(32, 64), _stage(64, channels), _stage(channels, channels, 1))


class YoloWithNms(nn.Module):
    """An anchor-free detector of one stage whose suppression is a loop in Python."""

    best, overlap = 100, 0.5

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _backbone(FEATURES)
        self.head = nn.Conv2d(FEATURES, 5, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes (x0, y0, x1, y1) in pixels and scores of one image."""
        found = self.head(self.backbone(image))[0]
        rows, columns = found.shape[-2:]
        y, x = torch.meshgrid(
            torch.arange(rows, device=image.device), torch.arange(columns, device=image.device), indexing="ij"
        )
        center = torch.stack([x, y]).flatten(1) * 8 + found[:2].flatten(1).tanh() * 8
        half = found[2:4].flatten(1).exp() * 8
        scores, order = found[4].flatten().sigmoid().topk(self.best)
        boxes = torch.cat([center - half, center + half]).t()[order]
        kept: list[int] = []
        for index in range(len(boxes)):
            if all(bool(self._iou(boxes[index], boxes[other]) < self.overlap) for other in kept):
                kept.append(index)
        return boxes[kept], scores[kept]

    @staticmethod
    def _iou(a: Tensor, b: Tensor) -> Tensor:
        inner = (torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])).clamp(min=0).prod()
        return inner / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - inner)


class GruPolicy(nn.Module):
    """Actions from images; its state is passed in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _backbone(FEATURES)
        self.cell = nn.GRUCell(FEATURES, FEATURES)
        self.actions = nn.Linear(FEATURES, 8)

    def forward(self, image: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The actions and the next state."""
        state = self.cell(self.backbone(image).mean((2, 3)), state)
        return self.actions(state), state


class GruWithMemory(nn.Module):
    """Actions from images; it keeps its state itself, from the first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = GruPolicy()
        self.state: Tensor | None = None

    def forward(self, image: Tensor) -> Tensor:
        """The actions."""
        if self.state is None:
            self.state = image.new_zeros(len(image), FEATURES)
        actions: Tensor
        actions, self.state = self.policy(image, self.state)
        return actions


class Averaged(nn.Module):
    """A segmenter whose logits are averaged over the frames."""

    average: Tensor

    def __init__(self, classes: int = 19, side: int = 28) -> None:
        super().__init__()
        self.backbone = _backbone(FEATURES)
        self.head = nn.Conv2d(FEATURES, classes, 1)
        self.register_buffer("average", torch.zeros(1, classes, side, side))

    def forward(self, image: Tensor) -> Tensor:
        """The averaged logits at the size of the image."""
        self.average.mul_(0.8).add_(self.head(self.backbone(image)), alpha=0.2)
        return F.interpolate(self.average, scale_factor=8, mode="bilinear", align_corners=False)


class Normalized(nn.Module):
    """It reads a number of its image with `.item()` and divides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _backbone(FEATURES)

    def forward(self, image: Tensor) -> Tensor:
        """The features of the normalized image."""
        largest: Any = image.abs().max().item()
        found: Tensor = self.backbone(image / max(largest, 1e-6))
        return found


class DayOrNight(nn.Module):
    """Two backbones; the brightness decides."""

    def __init__(self) -> None:
        super().__init__()
        self.day, self.night = _backbone(FEATURES), _backbone(FEATURES)

    def forward(self, image: Tensor) -> Tensor:
        """The features."""
        found: Tensor = self.day(image) if image.mean() > 0 else self.night(image)
        return found


class Clipping(nn.Module):
    """It writes to the image that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _backbone(FEATURES)

    def forward(self, image: Tensor) -> Tensor:
        """The features of the clipped image."""
        image.clamp_(-1, 1)
        found: Tensor = self.backbone(image)
        return found


_IMAGE = (1, 3, 224, 224)

OWN: dict[str, Callable[[], Made]] = {
    "yolo_with_nms": lambda: (YoloWithNms(), (_IMAGE,)),
    "gru_policy": lambda: (GruPolicy(), (_IMAGE, (1, FEATURES))),
    "gru_with_memory": lambda: (GruWithMemory(), (_IMAGE,)),
    "averaged_segmenter": lambda: (Averaged(), (_IMAGE,)),
    "normalized_by_item": lambda: (Normalized(), (_IMAGE,)),
    "day_or_night": lambda: (DayOrNight(), (_IMAGE,)),
    "writes_its_input": lambda: (Clipping(), (_IMAGE,)),
}
"""What makes each of them, by name."""
