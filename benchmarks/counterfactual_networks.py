"""The networks whose diagnoses are measured again: well-known ones, and small ones with a planted fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.anybody import anybody
from benchmarks.by_hand import Inputs

Made = tuple[nn.Module, Inputs]


class ByItem(nn.Module):
    """It reads a number of its input with `.item()` and decides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _stages(3, 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """The features of the normalized image."""
        largest = x.abs().max().item()
        found: Tensor = self.backbone(x / largest if largest > 1 else x)
        return found


class Moving(nn.Module):
    """It takes its input to where its weights are, so that nobody sees that it was elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _stages(3, 32)

    def forward(self, x: Tensor) -> Tensor:
        """The features of an image on any device."""
        found: Tensor = self.backbone(x.to(next(self.parameters()).device))
        return found


class Scaled(nn.Module):
    """Its weight is scaled in every call, to the same each time."""

    def __init__(self, features: int = 2048) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features) / features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the scaled weight."""
        return x @ (self.weight * 2 - self.weight.mean()).t()


def _stages(*channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for entering, leaving in itertools.pairwise(channels):
        layers += [nn.Conv2d(entering, leaving, 3, padding=1), nn.BatchNorm2d(leaving), nn.ReLU()]
    return nn.Sequential(*layers)


def _grouped() -> Made:
    convs = [nn.Conv2d(256, 256, 3, padding=1, groups=32) for _ in range(3)]
    return nn.Sequential(*convs), (torch.randn(1, 256, 56, 56),)


def _misaligned() -> Made:
    model = nn.Sequential(nn.Conv2d(126, 126, 3, padding=1), nn.ReLU(), nn.Conv2d(126, 126, 3, padding=1))
    return model, (torch.randn(4, 126, 64, 64),)


def _in_training() -> Made:
    model = _stages(3, 64, 64, 64)
    model.append(nn.Dropout(0.5))
    return model, (torch.randn(4, 3, 96, 96),)


PLANTED: dict[str, Callable[[], Made]] = {
    "groups of 8": _grouped,
    "channels of 126": _misaligned,
    "in training mode": _in_training,
    "item in forward": lambda: (ByItem(), (torch.randn(1, 3, 128, 128),)),
    "input on the host": lambda: (Moving(), (torch.randn(8, 3, 224, 224),)),
    "scaled weight": lambda: (Scaled(), (torch.randn(8, 2048),)),
}
"""What makes each of them with its inputs, on the CPU."""

KNOWN = (
    *("resnet18", "torchvision/resnet50", "mobilenet-v3-small", "encdecmil18", "linear5x128", "mlp3x4096"),
    "resnext50",
)

NETWORKS = (*KNOWN, *PLANTED)


def network(name: str, device: torch.device) -> Made:
    """A network with its inputs as its user has them: mostly in evaluation mode, and on the device.

    Equal names give equal weights in every process.
    """
    if name in KNOWN:
        model, inputs = anybody(name)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model, inputs = PLANTED[name]()
        model.train(name == "in training mode")
    if name != "input on the host":
        inputs = tuple(tensor.to(device) for tensor in inputs)
    return model.to(device), inputs
