"""Copies of optimizers have all attributes, those of wrapped ones too, and none of the user's weights."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.deep_copy import deep_copy

Optimizer = torch.optim.Optimizer


class Lookahead(Optimizer):
    """An optimizer around another, with weights and a lock of its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.lock = inner, threading.Lock()
        self.slow = [weight.detach().clone() for group in self.param_groups for weight in group["params"]]

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def _lookahead(weights: Any) -> Optimizer:
    return Lookahead(torch.optim.AdamW(weights, fused=True))


def _scheduled(weights: Any) -> Optimizer:
    optimizer = torch.optim.SGD(weights, 0.1)
    optimizer.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # type: ignore[attr-defined]
    return optimizer


def _hooked(weights: Any) -> Optimizer:
    optimizer = torch.optim.SGD(weights, 0.1)
    optimizer.register_step_pre_hook(lambda own, *_: own.calls.append(1))
    optimizer.calls = []  # type: ignore[attr-defined]
    return optimizer


def _lbfgs(weights: Any) -> Optimizer:
    return torch.optim.LBFGS(weights, max_iter=2)


def closure_of(model: nn.Module, optimizer: Optimizer) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("make", [_lbfgs, _lookahead, _scheduled, _hooked])
def test_a_copy_updates_the_copied_weights_alone(make: Any) -> None:
    model = nn.Linear(3, 2)
    own = make(model.parameters())
    memo: dict[Any, Any] = {}
    copied, optimizer = deep_copy(model, memo), deep_copy(own, memo)
    assert vars(optimizer).keys() == vars(own).keys()
    before = [weight.clone() for weight in model.parameters()]
    optimizer.step(closure_of(copied, optimizer))
    assert all(map(torch.equal, model.parameters(), before))
    assert not any(map(torch.equal, copied.parameters(), before))
    assert not own.state
    assert not getattr(own, "calls", [])
    assert not getattr(own, "_opt_called", False)


def test_what_wraps_an_optimizer_is_copied_with_all_of_it() -> None:
    model = nn.Linear(3, 2)
    own: Any = _lookahead(model.parameters())
    memo: dict[Any, Any] = {}
    copied, optimizer = deep_copy(model, memo), deep_copy(own, memo)
    assert optimizer.inner.param_groups[0]["params"][0] is copied.weight
    assert optimizer.inner._step_supports_amp_scaling  # by which GradScaler tells fused ones
    assert optimizer.slow[0] is not own.slow[0]
    assert optimizer.lock is own.lock


def test_a_scheduler_of_a_copy_sets_the_copys_rate() -> None:
    model = nn.Linear(3, 2)
    own: Any = _scheduled(model.parameters())
    optimizer = deep_copy(own, {})
    optimizer.step()
    optimizer.schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert own.param_groups[0]["lr"] == 0.1
    assert optimizer._opt_called


class Telling(torch.optim.SGD):
    """Says itself what its copies have."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "told": True}


def test_an_optimizer_that_tells_its_state_is_copied_by_that() -> None:
    own: Any = Telling([torch.nn.Parameter(torch.ones(2))], 0.1)
    own.left_out = 1
    optimizer = deep_copy(own, {})
    assert optimizer.told
    assert not hasattr(optimizer, "left_out")
