"""What has become of the weights' gradients between the updates of a watched training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor, nn

current_pass = torch._C._current_graph_task_id
"""The number of the backward pass that calls this."""


@dataclasses.dataclass
class Freshness:
    """Which gradients are fresh since the last update of a kind: by optimizers, or by hand.

    `stale` are those to which a backward pass has added after an update has used them, `adding` those to
    which it is about to. `is_used`: there was an update of the kind. Weights are told by identity.
    """

    fresh: set[int] = dataclasses.field(default_factory=set)
    stale: set[int] = dataclasses.field(default_factory=set)
    adding: set[int] = dataclasses.field(default_factory=set)
    is_used: bool = False

    def comes(self, own: int, *, has_gradient: bool) -> None:
        """A backward pass has a gradient for a weight, to be added, or for whoever asked for it."""
        self.adding.discard(own)
        if not has_gradient:
            self.stale.discard(own)
        elif self.is_used and own not in self.fresh:
            self.adding.add(own)
        self.fresh.add(own)

    def added(self, own: int) -> None:
        """The pass has added it."""
        if own in self.adding:
            self.stale.add(own)

    def applied(self, weights: frozenset[int]) -> None:
        """An update has used up the gradients of weights."""
        self.fresh -= weights
        self.stale -= weights
        self.adding -= weights
        self.is_used = True


@dataclasses.dataclass
class StepState:
    """What has happened since the last update; weights by identity. `inside`: how many updates now run.

    `learning` are the model's weights that may get gradients, `trained` those that an optimizer has. `latest`
    tells which gradients of the backward pass `last_pass` are not zeros, and `stepped` which weights a call's
    updates are of. `scales` are GradScaler's by address, and `scaled_pass` is the last backward pass of a
    loss that has one. `overflows` are what GradScaler has found in gradients, by address, with their weights,
    and `refused` has the line of the `scaler.step` that has left out a weight's gradient. `reset` are the
    lines of updates whose weights lost their gradients after the last backward pass. Gradients of these
    weights `came` in this call, `ever` in any. `adds_up`: a call has added to the gradients of one before it.
    `evaluates`: the model was in evaluation mode in a backward pass of this call.
    """

    learning: dict[str, nn.Parameter]
    trained: dict[str, nn.Parameter]
    call: int = 0
    by_optimizers: Freshness = dataclasses.field(default_factory=Freshness)
    by_hand: Freshness = dataclasses.field(default_factory=Freshness)
    ever: set[int] = dataclasses.field(default_factory=set)
    latest: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    last_pass: int | None = None
    stepped: set[int] = dataclasses.field(default_factory=set)
    scales: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    scaled_pass: int | None = None
    scaled: set[int] = dataclasses.field(default_factory=set)
    overflows: dict[int, tuple[Tensor, set[int]]] = dataclasses.field(default_factory=dict)
    refused: dict[int, str] = dataclasses.field(default_factory=dict)
    reset: dict[frozenset[int], str] = dataclasses.field(default_factory=dict)
    came: set[int] = dataclasses.field(default_factory=set)
    adds_up: bool = False
    evaluates: bool = False
    inside: int = 0
    has_gradients: bool = False
    before: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def watched(self) -> set[int]:
        """The weights whose gradients are seen: not those that were frozen when the watch began."""
        return {id(weight) for weight in self.learning.values()}

    def begin_call(self) -> None:
        """Forget what is of one call of the step."""
        self.inside, self.stepped, self.came, self.evaluates = 0, set(), set(), False

    def comes(self, weight: Tensor, gradient: Tensor) -> None:
        """A backward pass has a gradient for a weight, to be added, or for whoever asked for it."""
        own, is_more = id(weight), has_gradient(weight)
        for each in (self.by_optimizers, self.by_hand):
            each.comes(own, has_gradient=is_more)
        if not is_more:
            self.scaled.discard(own)
            self.refused.pop(own, None)
        self.adds_up |= is_more and own in self.ever - self.came
        self.came.add(own)
        now = current_pass()
        if now == self.scaled_pass:
            self.scaled.add(own)
        if now != self.last_pass:
            self.latest, self.last_pass = {}, now
        self.latest[own] = _numbers(gradient).any()
        self.has_gradients |= self.inside > 0  # a closure that the optimizer has called
        self.ever.add(own)

    def added(self, weight: Tensor) -> None:
        """A backward pass has added to a weight's gradient."""
        for each in (self.by_optimizers, self.by_hand):
            each.added(id(weight))

    def unscaled(self, gradients: Iterable[Tensor]) -> None:
        """Gradients were divided by the scale."""
        self.scaled -= self._weights_of(gradients)

    def note_overflow(self, found: Tensor, gradients: Iterable[Tensor]) -> None:
        """GradScaler has looked at gradients; `found` is above 0 where they, or others before, overflow."""
        _, weights = self.overflows.get(found.data_ptr(), (found, set[int]()))
        self.overflows[found.data_ptr()] = (found, weights | self._weights_of(gradients))

    def refuse(self, found: Tensor, place: str) -> None:
        """`scaler.step` reads at a line what was found in gradients, and leaves out those that overflow."""
        _, weights = self.overflows.pop(found.data_ptr())
        if bool(found):
            self.refused |= dict.fromkeys(weights, place)

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
        """An optimizer has used up the gradients of weights."""
        self.by_optimizers.applied(weights)
        self.scaled -= weights
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
    """A copy of the numbers of these weights, on the host."""
    return {name: host_copy(weight) for name, weight in learning_of(model).items()}


def host_copy(weight: Tensor) -> Tensor:
    """A copy of a weight's numbers on the host: a device has none to spare where a step fits just so."""
    return weight.detach().to("cpu", copy=True)


def moved_since(before: dict[str, Tensor], model: nn.Module) -> dict[int, float]:
    """By identity, how far weights have moved since `values_of`: ‖Δw‖, infinity where they are others."""
    both = (
        (weight, weight.detach().cpu(), before[n]) for n, weight in model.named_parameters() if n in before
    )
    return {id(weight): distance(now, then) for weight, now, then in both if not _are_same(now, then)}


def distance(now: Tensor, before: Tensor) -> float:
    """‖Δw‖ of a weight; infinity where it has another shape."""
    if now.shape != before.shape:
        return torch.inf
    return float(torch.linalg.vector_norm((now - before).float()))


def _are_same(now: Tensor, before: Tensor) -> bool:
    is_alike = (now.shape, now.dtype) == (before.shape, before.dtype)
    return is_alike and torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
