"""Faults of the user's own training step: each is named with its line, and a step without one has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.diagnosis.finding import Finding
from ampopt.diagnosis.step_watch import WatchedSteps, watch_steps
from ampopt.diagnosis.training import TrainingCase
from ampopt.diagnosis.training_findings import find_in_training, verdict_of
from tests.support.training import (
    SCALER,
    TARGET,
    Optimizer,
    again_after_scaler,
    case_of,
    clean,
    line_of,
    loss_of,
    net,
    watched,
)


def accumulating(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    for half in x.chunk(2):
        F.cross_entropy(model(half), TARGET[: len(half)]).backward()
    optimizer.step()


def again_after_refusal(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    SCALER.scale(loss_of(model(x)) * torch.inf).backward()
    SCALER.step(optimizer)
    SCALER.update()
    optimizer.step()


def twice(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()
    optimizer.step()


def scaled(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    SCALER.scale(loss_of(model(x))).backward()
    optimizer.step()


def never_reset(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    optimizer.step()


def never_updated(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()


def evaluated(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model.eval()
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


def faults(case: TrainingCase) -> dict[str, Finding]:
    return {each.name: each for each in find_in_training(case) if each.is_fault}


@pytest.mark.parametrize("step", [clean, accumulating])
def test_a_step_without_a_fault_has_none(step: Any) -> None:
    assert not faults(watched(step))


def test_an_update_after_scaler_step_is_named_with_both_lines() -> None:
    case = watched(again_after_scaler)
    found = faults(case)["repeated-update"]
    assert line_of(again_after_scaler, "optimizer.step()") in found.places[0]
    assert line_of(clean, "SCALER.step(optimizer)") in found.places[1]
    assert "moves the weights 100% as far again" in found.says  # SGD without momentum
    assert "scaler.step(optimizer) calls optimizer.step()" in found.advice
    assert str(found.counterfactual) == (
        "with one update for each backward pass, a step takes 1 ms instead of 2 (2.00x, 2.00 to 2.00)"
    )
    assert verdict_of(case, (found,)).startswith(
        "YOURS 2 ms, FP32 2 ms, AMP 1 ms a training step (zero_grad 5%, forward 30%, backward 50%, "
        "optimizer 15%): training.py:"
    )


def test_an_update_that_the_scaler_refused_is_named() -> None:
    found = faults(watched(again_after_refusal))["repeated-update"]
    assert line_of(again_after_refusal, "optimizer.step()") in found.places[0]
    assert line_of(again_after_refusal, "SCALER.step") in found.places[1]
    assert "has refused because they overflow" in found.says


def test_two_updates_without_a_scaler() -> None:
    found = faults(watched(twice))["repeated-update"]
    assert line_of(twice, "optimizer.step()", last=True) in found.places[0]
    assert found.advice == "remove one of them"


@pytest.mark.parametrize(
    ("step", "name", "text"),
    [
        (scaled, "scaled-gradients", "optimizer.step()"),
        (never_reset, "stale-gradients", "optimizer.step()"),
        (evaluated, "evaluation-mode-in-training", "loss_of(model(x))"),
    ],
)
def test_a_fault_is_named_with_its_line(step: Any, name: str, text: str) -> None:
    found = faults(watched(step))
    assert found.keys() == {name}
    assert line_of(step, text) in found[name].places[0]


def test_gradients_that_add_up_move_the_weights_further_each_time() -> None:
    says = faults(watched(never_reset))["stale-gradients"].says
    assert "update 3 moves the weights 3." in says or "update 3 moves the weights 2." in says


def test_a_step_that_never_updates() -> None:
    assert faults(watched(never_updated)).keys() == {"no-update"}


@pytest.mark.parametrize(("momentum", "says"), [(0.99, "99% those of the last"), (0.0, "never change")])
def test_a_momentum_of_another_framework(momentum: float, says: str) -> None:
    model = net()
    model[1].momentum = momentum  # type: ignore[index]
    found = faults(watched(clean, model))["batch-norm-momentum"]
    assert says in found.says
    assert found.places == ('1, net.py:3, "norm"',)


@pytest.mark.parametrize("momentum", [0.1, 0.01, None])
def test_a_usual_momentum_is_none(momentum: float | None) -> None:
    model = net()
    model[1].momentum = momentum  # type: ignore[index]
    assert not faults(watched(clean, model))


def test_nothing_is_left_on_what_was_watched() -> None:
    training = case_of().subject.copied()
    seen = watch_steps(clean, training.model, training.optimizer, training.args, {})
    assert isinstance(seen, WatchedSteps)
    assert (len(seen.updates), seen.forwards, seen.evaluated) == (3, 3, 0)
    assert all(update.by_scaler and update.moved > 0 for update in seen.updates)
    assert not training.model._forward_pre_hooks
    assert not any(weight._backward_hooks for weight in training.model.parameters())
