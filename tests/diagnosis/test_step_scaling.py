"""What a step does with the gradients of a scaled loss: limits, divisions by hand, a scaler never updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.diagnosis.training import measure_training
from tests.support.training import SCALER, Optimizer, case_of, line_of, loss_of, net, seen, step_faults


def limited_norm(model: nn.Module, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def limited_values(model: nn.Module, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def limited_after(model: nn.Module, optimizer: Optimizer) -> None:
    SCALER.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def limited_as_scaled(model: nn.Module, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0 * SCALER.get_scale())


@pytest.mark.parametrize(
    ("limit", "is_wrong"),
    [(limited_norm, True), (limited_values, True), (limited_after, False), (limited_as_scaled, False)],
)
def test_limits_for_gradients_of_a_scaled_loss_are_told(limit: Any, is_wrong: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler_of_module = SCALER.state_dict()

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        SCALER.scale(loss_of(model(x))).backward()
        limit(model, optimizer)
        SCALER.step(optimizer)
        SCALER.update()

    try:
        SCALER.load_state_dict(scaler.state_dict())
        found = step_faults(seen(step))
    finally:
        SCALER.load_state_dict(scaler_of_module)
    assert found.keys() == ({"clipped-scaled-gradients"} if is_wrong else set())
    if is_wrong:
        (place,) = found["clipped-scaled-gradients"].places
        assert line_of(limit, "nn.utils.clip") in place
        assert "its limit of 0.001 is one of 9.8e-07" in found["clipped-scaled-gradients"].says


def divided(gradients: list[Tensor], scale: float) -> None:
    for gradient in gradients:
        gradient.div_(scale)


def times_the_inverse(gradients: list[Tensor], scale: float) -> None:
    torch._foreach_mul_(gradients, 1 / scale)


@pytest.mark.parametrize(("undo", "is_wrong"), [(divided, False), (times_the_inverse, False), (None, True)])
def test_gradients_may_be_divided_by_hand(undo: Any, is_wrong: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x))).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        (undo or (lambda *_: None))(gradients, scaler.get_scale())
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    wrong = {"scaled-gradients", "clipped-scaled-gradients"}
    assert step_faults(seen(step)).keys() == (wrong if is_wrong else set())


def test_a_scaler_that_is_never_updated_is_a_fault_and_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.0)
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x))).backward()
        scaler.step(optimizer)

    case = case_of(net(), step)
    measure_training(case, lambda *_: None)
    found = step_faults(case)
    assert found.keys() == {"no-scaler-update"}
    assert line_of(step, "scaler.step(optimizer)") in found["no-scaler-update"].places[0]
    assert any(
        note.startswith("a step in yours was not timed: RuntimeError: step() has") for note in case.notes
    )
