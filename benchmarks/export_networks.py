"""The networks whose ONNX export is measured: the workloads, torchvision's families, ten networks of timm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks import families
from benchmarks.models import WORKLOADS, randomize_batch_norm

TIMM = (
    *("convnextv2_atto", "deit_tiny_patch16_224", "edgenext_xx_small", "fastvit_t8", "hrnet_w18_small"),
    *("mixer_s32_224", "mobilenetv4_conv_small", "nf_regnet_b0", "poolformer_s12", "res2net50_26w_4s"),
)
"""Ten kinds: attention, token mixing, pooling, several resolutions or branches, standardized weights."""

NETWORKS: tuple[str, ...] = (
    *WORKLOADS,
    *(f"torchvision/{name}" for name in (*families.CLASSIFIERS, *families.SEGMENTERS)),
    *(f"timm/{name}" for name in TIMM),
)
"""The names of all networks, in the order of the table."""


def network(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network of `NETWORKS` in eval mode with random weights, and float32 inputs for it, on the CPU.

    Raises ImportError where the package that it comes from is missing.
    """
    package, _, inner = name.rpartition("/")
    if not package:
        return WORKLOADS[name].model(), WORKLOADS[name].inputs()
    model, x = families.build(inner) if package == "torchvision" else _timm(inner)
    generator = torch.Generator().manual_seed(2)
    make_small_constants_random(model, generator)
    randomize_batch_norm(model, (x,), generator)
    return model, (x,)


def make_small_constants_random(model: nn.Module, generator: torch.Generator) -> None:
    """Draw from N(0, 0.1) every parameter that begins as one constant of at most 0.01.

    Those are biases, the scales at the end of residual blocks (1e-6 in ConvNeXt) and some heads: a mistake in
    what they are multiplied with would not show.
    """
    for parameter in model.parameters():
        first = parameter.detach().flatten()[:1]
        if first.abs() <= 0.01 and bool((parameter == first).all()):
            nn.init.normal_(parameter, std=0.1, generator=generator)


def _timm(name: str) -> tuple[nn.Module, Tensor]:
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model: nn.Module = timm.create_model(name, pretrained=False).eval()
    shape: tuple[int, ...] = model.pretrained_cfg["input_size"]  # type: ignore[index, assignment]
    return model, torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
