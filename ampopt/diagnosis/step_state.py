"""What has become of the weights' gradients between the updates of a watched training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor, nn

current_pass = torch._C._current_graph_task_id
"""The number of the backward pass that calls this."""


@dataclasses.dataclass
class StepState:
    """What has happened since the last update; weights by identity. `inside`: how many updates now run.

    `learning` are the model's weights that may get gradients, `trained` those that an optimizer has. `latest`
    tells which gradients of the backward pass `last_pass` are not zeros, and `stepped` which weights a call's
    updates are of. `scales` are GradScaler's by address, and `scaled_pass` is the last backward pass of a
    loss that has one. `refused` has the line of the `scaler.step` that has looked at a weight's gradient,
    until it applies it.
    """

    learning: dict[str, nn.Parameter]
    trained: dict[str, nn.Parameter]
    call: int = 0
    fresh: set[int] = dataclasses.field(default_factory=set)
    ever: set[int] = dataclasses.field(default_factory=set)
    stale: set[int] = dataclasses.field(default_factory=set)
    latest: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    last_pass: int | None = None
    stepped: set[int] = dataclasses.field(default_factory=set)
    scales: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    scaled_pass: int | None = None
    scaled: set[int] = dataclasses.field(default_factory=set)
    refused: dict[int, str] = dataclasses.field(default_factory=dict)
    inside: int = 0
    has_gradients: bool = False
    before: list[Tensor] = dataclasses.field(default_factory=list)

    def comes(self, weight: Tensor, gradient: Tensor, *, is_updated: bool) -> None:
        """A backward pass is about to add to a weight's gradient; `is_updated`: there was an update."""
        own = id(weight)
        if not has_gradient(weight):
            self.stale.discard(own)
            self.scaled.discard(own)
            self.refused.pop(own, None)
        elif is_updated and own not in self.fresh:
            self.stale.add(own)
        now = current_pass()
        if now == self.scaled_pass:
            self.scaled.add(own)
        if now != self.last_pass:
            self.latest, self.last_pass = {}, now
        self.latest[own] = _numbers(gradient).any()
        self.has_gradients |= self.inside > 0  # a closure that the optimizer has called
        self.fresh.add(own)
        self.ever.add(own)

    def unscaled(self, gradients: Iterable[Tensor], place: str | None) -> None:
        """Gradients were divided by the scale; `place`: where GradScaler decides now whether to update."""
        for own in self._weights_of(gradients):
            self.scaled.discard(own)
            if place is not None:
                self.refused[own] = place

    def has_scaled(self, gradients: Iterable[Tensor]) -> bool:
        """Whether there are gradients of a scaled loss among these."""
        return not self.scaled.isdisjoint(self._weights_of(gradients))

    def _weights_of(self, gradients: Iterable[Tensor]) -> set[int]:
        places = {gradient.data_ptr() for gradient in gradients if gradient.numel()}
        pairs = ((id(weight), gradient_of(weight)) for weight in self.learning.values())
        return {own for own, gradient in pairs if gradient is not None and gradient.data_ptr() in places}

    def were_reset(self, weights: Iterable[int]) -> bool:
        """Whether the last backward pass brought gradients to weights that have none, or zeros."""
        return any(bool(self.latest[own]) for own in weights if own in self.latest)

    def applied(self, weights: frozenset[int]) -> None:
        """The gradients of weights are used up."""
        self.fresh, self.stale, self.scaled = (
            self.fresh - weights,
            self.stale - weights,
            self.scaled - weights,
        )
        self.latest = {weight: found for weight, found in self.latest.items() if weight not in weights}
        self.refused = {weight: place for weight, place in self.refused.items() if weight not in weights}
        self.before = []


def gradient_of(weight: Tensor) -> Tensor | None:
    """The numbers of a weight's gradient."""
    return None if weight.grad is None else _numbers(weight.grad)


def has_gradient(weight: Tensor) -> bool:
    """Whether a weight has a gradient other than zeros, to which gradients are reset, too."""
    gradient = gradient_of(weight)
    return gradient is not None and bool(gradient.any())


def _numbers(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def learning_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a model that may get gradients."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the numbers of these weights."""
    return {name: weight.detach().clone() for name, weight in learning_of(model).items()}


def moved_since(before: dict[str, Tensor], model: nn.Module) -> dict[int, float]:
    """By identity, how far weights have moved since `values_of`: ‖Δw‖, infinity where they are others."""
    now = {name: weight.detach() for name, weight in model.named_parameters() if name in before}
    return {
        id(weight): distance(now[name], before[name])
        for name, weight in model.named_parameters()
        if name in before and not _are_same(now[name], before[name])
    }


def distance(now: Tensor, before: Tensor) -> float:
    """‖Δw‖ of a weight; infinity where it has another shape or device."""
    if now.shape != before.shape or now.device != before.device:
        return torch.inf
    return float(torch.linalg.vector_norm((now - before).float()))


def _are_same(now: Tensor, before: Tensor) -> bool:
    is_alike = (now.shape, now.device, now.dtype) == (before.shape, before.device, before.dtype)
    return is_alike and torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
