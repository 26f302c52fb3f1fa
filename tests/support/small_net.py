"""A small network on a GPU, its images and its answers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampopt.ir.lanes import FP32
from ampopt.passes import CudaGraph, FoldConvBn
from tests.helpers import eager_of, with_statistics

PASSES = (FoldConvBn(), CudaGraph())


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))
    return with_statistics(nn.Sequential(*layers)).cuda()


def image(height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 3, height, width, generator=generator).cuda()


def expected(model: nn.Module, x: Tensor) -> Tensor:
    """The model's answer in strict FP32."""
    return eager_of(model, [x], FP32)[0]


def close(actual: Tensor, wanted: Tensor) -> bool:
    return actual.shape == wanted.shape and bool((actual - wanted).norm() <= 1e-5 * wanted.norm())
