"""Real inputs: handwritten digits for a small CNN trained here, and photographs for the larger networks.

Both come with scikit-learn: 1,797 digits of 8×8 pixels, and two photographs of 427×640 pixels.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt import MissingExtraError, OptimizedModule, optimize


def _sklearn_datasets() -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "dev") from error
    return datasets


class DigitsNet(nn.Module):
    """Three convolutions with batch normalization and a linear layer: [N, 1, 8, 8] -> [N, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 32, 64, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for a batch of images."""
        x = F.max_pool2d(self.blocks[1](self.blocks[0](x)), 2)
        x = self.blocks[2](x).mean((2, 3))
        out: Tensor = self.classifier(self.dropout(x))
        return out


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(train images, train labels, test images, test labels): [N, 1, 8, 8] in [0, 1], 1,297 to train."""
    bunch = _sklearn_datasets().load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[:1297], labels[:1297], images[1297:], labels[1297:]


def train_digits(epochs: int = 12, seed: int = 0) -> DigitsNet:
    """A `DigitsNet` trained for some seconds on a CPU, in evaluation mode; the same for the same seed."""
    images, labels, _, _ = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitsNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(labels)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that a model classifies as labelled, in percent, one image at a time."""
    with torch.no_grad():
        hits = [
            int(model(image[None]).argmax()) == int(label)
            for image, label in zip(images, labels, strict=True)
        ]
    return 100.0 * sum(hits) / len(hits)


@dataclasses.dataclass(frozen=True)
class DigitsResult:
    """Test accuracy in percent of the original and of each lane's optimized model, and those models."""

    original: float
    lanes: dict[str, float]
    modules: dict[str, OptimizedModule]


def optimize_digits(device: torch.device, budget_s: float = 30.0) -> DigitsResult:
    """Train, optimize in both lanes, test all three on the 500 test images."""
    model = train_digits().to(device)
    _, _, images, labels = (tensor.to(device) for tensor in digits())
    lanes, modules = {}, {}
    for lane in ("fp32", "amp"):
        fast = optimize(model, (images[:1],), precision=lane, budget_s=budget_s, cache=False)
        assert isinstance(fast, OptimizedModule)
        modules[lane], lanes[lane] = fast, accuracy(fast, images, labels)
    return DigitsResult(accuracy(model, images, labels), lanes, modules)


def photographs(height: int, width: int) -> Tensor:
    """scikit-learn's two photographs as [2, 3, height, width] in [0, 1], resized bilinearly."""
    images = np.stack(_sklearn_datasets().load_sample_images().images).astype(np.float32) / 255
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return F.interpolate(tensor, (height, width), mode="bilinear", align_corners=False)
