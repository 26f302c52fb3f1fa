"""The ways to train that the mixed-precision questions compare: those of `ampopt.diagnose`, and apex's O2.

O2 has 16-bit weights with FP32 batch normalization, FP32 copies of the weights that the optimizer changes,
and a constant loss scale. The optimizer is SGD, TF32 is off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ampopt.diagnosis.training_step import (
    RATE,
    Step,
    Subject,
    Training,
    amp,
    fp32,
    graphed,
    in_channels_last,
)

LOSS_SCALE = 128.0
"""The constant loss scale of O2, apex's default for it."""


@dataclasses.dataclass
class Mastered(Training):
    """A step of 16-bit weights; `masters` are their FP32 copies, in their order."""

    masters: Sequence[Tensor] = ()

    def backward(self, loss: Tensor) -> None:
        """The gradients of the scaled loss."""
        (loss * LOSS_SCALE).backward()

    def update(self) -> None:
        """The optimizer's step on the copies, which the weights then take."""
        weights = list(self.model.parameters())
        for weight, master in zip(weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float() / LOSS_SCALE
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, self.masters, strict=True):
                weight.copy_(master)


def o2(subject: Subject) -> Mastered:
    """apex's O2."""
    given = subject.copied()
    dtype = torch.float16 if given.device.type == "cuda" else torch.bfloat16
    model = given.model.to(dtype)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.float()
    masters = [weight.detach().float().clone() for weight in model.parameters()]
    args = tuple(x.to(dtype) if x.is_floating_point() else x for x in given.args)

    def in_fp32(result: Any) -> Tensor:
        return given.loss(tuple(r.float() for r in result) if isinstance(result, tuple) else result.float())

    return Mastered(model, args, in_fp32, torch.optim.SGD(masters, RATE), given.device, masters=masters)


Make = Callable[[Subject], Step]

EAGER: dict[str, Make] = {
    "fp32": fp32,
    "amp": amp,
    "amp + channels_last": lambda subject: in_channels_last(amp(subject)),
    "O2": o2,
}
"""The ways that run everywhere."""

GRAPHED: dict[str, Make] = {
    "fp32 + CUDA graph": lambda subject: graphed(fp32(subject)),
    "amp + CUDA graph": lambda subject: graphed(amp(subject)),
    "amp + channels_last + CUDA graph": lambda subject: graphed(in_channels_last(amp(subject))),
}
"""The ways that need a GPU."""


def ways(device: torch.device) -> dict[str, Make]:
    """All ways of a device."""
    return {**EAGER, **(GRAPHED if device.type == "cuda" else {})}
