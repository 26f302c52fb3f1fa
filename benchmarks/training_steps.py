"""A training step, in the ways that the mixed-precision questions compare: what is called, and its parts.

A step is `zero_grad`, forward and loss, backward, and the optimizer's step, with SGD. In mixed precision the
loss is scaled by `GradScaler`, on a CPU it is bfloat16 without one. "O2" is apex's: 16-bit weights with FP32
batch normalization, FP32 copies of the weights that the optimizer changes, and a constant loss scale.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Loss = Callable[[Any], Tensor]
"""The loss of a model's result."""

RATE = 1e-4
"""The learning rate: small, so that hundreds of steps on one batch of noise stay finite."""

LOSS_SCALE = 128.0
"""The constant loss scale of O2, apex's default for it."""

WARM_STEPS = 3
"""Steps before a capture: cuDNN and the optimizer have allocated what they need."""

Step = Callable[[], object]


@dataclasses.dataclass
class Training:
    """A model in training mode with its batch, loss and optimizer; a call is one step.

    `dtype` is autocast's, None in FP32; `masters` are the FP32 copies of 16-bit weights, in their order.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Loss
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    masters: Sequence[Tensor] = ()

    def __call__(self) -> Tensor:
        """One step; its loss."""
        self.zero_grad()
        loss = self.forward()
        self.backward(loss)
        self.update()
        return loss.detach()

    @property
    def parts(self) -> dict[str, Callable[[Any], Any]]:
        """The parts of a step in their order; each takes what the one before it gave."""
        return {
            "zero_grad": lambda _: self.zero_grad(),
            "forward": lambda _: self.forward(),
            "backward": self.backward,
            "optimizer": lambda _: self.update(),
        }

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad(set_to_none=True)

    def forward(self) -> Tensor:
        """The loss."""
        with torch.autocast(self.inputs[0].device.type, self.dtype, enabled=self.dtype is not None):
            return self.loss(self.model(*self.inputs))

    def backward(self, loss: Tensor) -> None:
        """The gradients."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        elif self.masters:
            loss = loss * LOSS_SCALE
        loss.backward()

    def update(self) -> None:
        """The optimizer's step."""
        if self.masters:
            self._update_masters()
        elif self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def _update_masters(self) -> None:
        weights = list(self.model.parameters())
        for weight, master in zip(weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float() / LOSS_SCALE
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, self.masters, strict=True):
                weight.copy_(master)


def fp32(model: nn.Module, inputs: tuple[Tensor, ...], loss: Loss) -> Training:
    """Everything in FP32, TF32 off."""
    model = copy.deepcopy(model).train()
    return Training(model, inputs, loss, torch.optim.SGD(model.parameters(), RATE))


def amp(model: nn.Module, inputs: tuple[Tensor, ...], loss: Loss) -> Training:
    """Autocast, with a `GradScaler` on a GPU."""
    training = fp32(model, inputs, loss)
    on_gpu = inputs[0].device.type == "cuda"
    training.dtype = torch.float16 if on_gpu else torch.bfloat16
    training.scaler = torch.amp.GradScaler("cuda") if on_gpu else None
    return training


def amp_channels_last(model: nn.Module, inputs: tuple[Tensor, ...], loss: Loss) -> Training:
    """Autocast with images and convolutions in channels_last."""
    training = amp(model, inputs, loss)
    training.model.to(memory_format=torch.channels_last)
    training.inputs = tuple(
        x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs
    )
    return training


def o2(model: nn.Module, inputs: tuple[Tensor, ...], loss: Loss) -> Training:
    """apex's O2."""
    dtype = torch.float16 if inputs[0].device.type == "cuda" else torch.bfloat16
    model = copy.deepcopy(model).train().to(dtype)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.float()
    masters = [weight.detach().float().clone() for weight in model.parameters()]
    given = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)

    def in_fp32(result: Any) -> Tensor:
        return loss(tuple(r.float() for r in result) if isinstance(result, tuple) else result.float())

    return Training(model, given, in_fp32, torch.optim.SGD(masters, RATE), masters=masters)


def graphed(training: Training) -> Step:
    """The whole step as one CUDA graph; `GradScaler` needs an optimizer that looks at overflows itself."""
    training.optimizer = torch.optim.SGD(training.model.parameters(), RATE, fused=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_STEPS):
            training()
    torch.cuda.current_stream().wait_stream(side)
    training.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training()

    def replay(_kept: Training = training) -> None:
        graph.replay()

    return replay


Make = Callable[[nn.Module, tuple[Tensor, ...], Loss], Step]

EAGER: dict[str, Make] = {"fp32": fp32, "amp": amp, "amp + channels_last": amp_channels_last, "O2": o2}
"""The ways that run everywhere."""

GRAPHED: dict[str, Make] = {
    "fp32 + CUDA graph": lambda *given: graphed(fp32(*given)),
    "amp + CUDA graph": lambda *given: graphed(amp(*given)),
    "amp + channels_last + CUDA graph": lambda *given: graphed(amp_channels_last(*given)),
}
"""The ways that need a GPU."""


def ways(device: torch.device) -> dict[str, Make]:
    """All ways of a device."""
    return {**EAGER, **(GRAPHED if device.type == "cuda" else {})}
