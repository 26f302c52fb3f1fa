"""Networks that nobody tuned ampopt for, of 22 families: what a stranger might bring to a default call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.race_networks import RACE

CALIBRATION_BATCH = 8
"""Images whose statistics batch normalization takes: it needs several where the feature map is one pixel."""

_SEGMENTERS = ("deeplabv3_mobilenet_v3_large",)

_TIMM = (
    *("mobilenetv4_conv_small", "fastvit_t8", "mobilevit_xxs", "repvit_m0_9", "mixnet_s", "tinynet_e"),
    *("efficientnet_b0", "mobileone_s0", "ghostnet_100", "densenet121", "poolformer_s12"),
    *("xcit_nano_12_p16_224", "swinv2_cr_tiny_ns_224", "edgenext_xx_small", "lcnet_050"),
    *("hrnet_w18_small", "convnext_atto", "resnest14d", "regnety_002", "efficientnet_lite0"),
    "efficientvit_b0",
)

COLD: tuple[str, ...] = (*_SEGMENTERS, *_TIMM)
"""Their names, those of torchvision first, then those of timm."""


class UnknownNetworkError(LookupError):
    """The package is missing, or its version has no such network."""


def stranger(name: str) -> tuple[nn.Module, Tensor]:
    """A network of `COLD` in eval mode with seeded random weights, and an image for it, on the CPU.

    Batch normalization has the statistics of one batch in training mode, so that no layer's values vanish or
    grow. Raises UnknownNetworkError.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model, shape = _segmenter(name) if name in _SEGMENTERS else _from_timm(name)
    generator = torch.Generator().manual_seed(1)
    model.eval()
    take_statistics(model, torch.randn(CALIBRATION_BATCH, *shape, generator=generator))
    return model, torch.randn(1, *shape, generator=generator)


def _segmenter(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    try:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name, weights=None, weights_backbone=None)
    except (ImportError, ValueError) as error:
        raise UnknownNetworkError(f"no {name} in torchvision: {error}") from error
    return model, (3, 224, 224)


def _from_timm(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    try:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
    except (ImportError, RuntimeError) as error:
        raise UnknownNetworkError(f"no {name} in timm: {error}") from error
    shape: tuple[int, ...] = model.pretrained_cfg["input_size"]  # type: ignore[index, assignment]
    return model, shape


def take_statistics(model: nn.Module, *batch: Any) -> None:
    """Give batch normalization the statistics of one call; the rest of the model stays in eval mode."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        model(*batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


def all_names() -> tuple[str, ...]:
    """Those that a cold process can be asked for: the strangers first, then the networks of the race."""
    return (*COLD, *RACE)
