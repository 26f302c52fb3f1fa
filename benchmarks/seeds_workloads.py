"""The workloads of the five questions that ampopt comes from, with the figures that were reported there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.diagnosis.training_step import Loss
from benchmarks.models import WORKLOADS, Workload
from benchmarks.networks import linear_chain, mlp3x4096, mnist_cnn


@dataclasses.dataclass(frozen=True)
class Reported:
    """A figure of a question: ms of one training step or of a part, and peak memory in MB if it is told."""

    device: str
    way: str
    ms: float
    mb: float | None = None
    part: str = "step"


@dataclasses.dataclass(frozen=True)
class Seed:
    """A workload of a question. `loss` makes the loss of results for a batch, from seeded targets."""

    question: str
    workload: Workload
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Loss]
    reported: tuple[Reported, ...] = ()

    @property
    def name(self) -> str:
        """The workload's name."""
        return self.workload.name


def mean_square(model: nn.Module, inputs: tuple[Tensor, ...]) -> Loss:
    """The mean square of the distance to targets that are noise."""
    with torch.no_grad():
        target = torch.randn_like(model(*inputs).float())
    return lambda result: F.mse_loss(result.float(), target)


def classification(model: nn.Module, inputs: tuple[Tensor, ...]) -> Loss:
    """The cross-entropy with random classes."""
    with torch.no_grad():
        logits = model(*inputs)
    classes = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return lambda result: F.cross_entropy(result.float(), classes)


def segmentation(_model: nn.Module, inputs: tuple[Tensor, ...]) -> Loss:
    """The cross-entropy of every pixel, with logits upsampled to the image."""
    size = inputs[0].shape[-2:]
    classes = torch.arange(size[0] * size[1], device=inputs[0].device).reshape(1, *size) % 19
    classes = classes.expand(len(inputs[0]), *size)

    def loss(result: Any) -> Tensor:
        return F.cross_entropy(F.interpolate(result[1].float(), size=size, mode="bilinear"), classes)

    return loss


def _chain(depth: int, width: int, batch: int) -> Workload:
    return Workload(f"linear{depth}x{width}-b{batch}", lambda: linear_chain(depth, width), ((batch, width),))


_V100, _T4, _3090, _1080 = "V100", "T4", "RTX 3090", "GTX 1080 Ti"
_2060, _2080 = "RTX 2060 Super", "RTX 2080 Ti"

SEEDS: dict[str, Seed] = {
    seed.name: seed
    for seed in (
        Seed(
            "S1",
            Workload("mlp3x4096-b512", mlp3x4096, ((512, 4096),)),
            mean_square,
            (
                Reported(_V100, "fp32", 1760 / 150, 1367),
                Reported(_V100, "amp", 833 / 150, 1401),
                Reported(_T4, "fp32", 7020 / 150, 1351),
                Reported(_T4, "amp", 2524 / 150, 1577),
            ),
        ),
        Seed(
            "S1",
            Workload("conv3x64-b64", WORKLOADS["conv3x64"].make_model, ((64, 3, 224, 224),)),
            mean_square,
            (
                Reported(_V100, "fp32", 1.2196),
                Reported(_V100, "amp", 1.4858),
                Reported(_V100, "amp + channels_last", 0.8443),
            ),
        ),
        Seed(
            "S1",
            WORKLOADS["resnet18-b64"],
            classification,
            (Reported(_V100, "fp32", 27580 / 500, 3740), Reported(_V100, "amp", 15230 / 500, 3250)),
        ),
        Seed(
            "S2",
            _chain(50, 512, 1024),
            mean_square,
            (Reported(_3090, "fp32", 11.35), Reported(_3090, "amp", 19.76)),
        ),
        Seed(
            "S2",
            _chain(50, 512, 10240),
            mean_square,
            (Reported(_3090, "fp32", 30.73), Reported(_3090, "amp", 20.55)),
        ),
        Seed(
            "S2",
            _chain(5, 128, 20),
            mean_square,
            (
                Reported(_2060, "fp32", 0.931),
                Reported(_2060, "amp", 1.866),
                Reported(_2080, "fp32", 0.216),
                Reported(_2080, "amp", 0.350),
            ),
        ),
        Seed(
            "S3",
            WORKLOADS["deeplabv3plus-r101-b4"],
            segmentation,
            (Reported(_1080, "fp32", 1397.27), Reported(_1080, "amp", 2511.72)),
        ),
        Seed(
            "S4",
            Workload("mnist-b512", mnist_cnn, ((512, 1, 28, 28),)),
            classification,
            (Reported(_T4, "fp32", 107200 / 2360, 417), Reported(_T4, "amp", 104900 / 2360, 175)),
        ),
        Seed(
            "S4",
            Workload("mnist-b1024", mnist_cnn, ((1024, 1, 28, 28),)),
            classification,
            (Reported(_T4, "amp", 100500 / 1180, 321),),
        ),
        Seed(
            "S5",
            WORKLOADS["cropunet"],
            mean_square,
            tuple(
                Reported("not told", "fp32", ms, part=part)
                for part, ms in (("forward", 10.577), ("backward", 15.327), ("optimizer", 4.073))
            ),
        ),
        Seed(
            "S5",
            WORKLOADS["encdecmil18"],
            mean_square,
            tuple(
                Reported("not told", "fp32", ms, part=part)
                for part, ms in (("forward", 26.028), ("backward", 42.614), ("optimizer", 15.681))
            ),
        ),
    )
}
"""By name, in the order of the questions; S4's epochs have 118 steps of 512, or 59 of 1,024 images."""
