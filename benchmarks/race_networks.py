"""The networks of the race: the workloads, and others that users deploy, some of them in batches of 8."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.export_networks import network
from benchmarks.models import WORKLOADS

BATCH_8 = "-b8"
"""Ends the name of a network that is run on a batch of 8."""

_IN_BATCHES = (
    *("torchvision/efficientnet_b0", "torchvision/mobilenet_v2", "timm/repvgg_a0"),
    *("torchvision/convnext_tiny", "timm/vit_tiny_patch16_224"),
)
_ALONE = (
    *("torchvision/swin_t", "torchvision/lraspp_mobilenet_v3_large", "torchvision/fcn_resnet50"),
    "torchvision/inception_v3",
)

RACE: tuple[str, ...] = (
    *WORKLOADS,
    *_IN_BATCHES,
    *_ALONE,
    *(name + BATCH_8 for name in _IN_BATCHES),
)
"""The names of all networks, in the order of the table."""


def racer(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network of `RACE` in eval mode with random weights, and float32 inputs for it, on the CPU.

    Raises ImportError where the package that it comes from is missing.
    """
    model, inputs = network(name.removesuffix(BATCH_8))
    if not name.endswith(BATCH_8):
        return model, inputs
    generator = torch.Generator().manual_seed(8)
    return model, tuple(torch.randn(8, *tensor.shape[1:], generator=generator) for tensor in inputs)
