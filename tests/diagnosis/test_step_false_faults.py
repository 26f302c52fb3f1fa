"""Steps that are right, and look like wrong ones: no fault is told of them, nor a reason that is none."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.diagnosis.step_state import values_of
from tests.support.training import Optimizer, line_of, loss_of, net, seen, step_faults


def usual(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


def unscaling(scaler: torch.amp.GradScaler) -> Any:
    """The recipe of PyTorch's documentation, with a loss that is no number."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x)) * torch.nan).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_overflow_after_unscale_are_refused_by_the_scalers_step(fused: bool) -> None:
    model, step = net(), unscaling(torch.amp.GradScaler("cpu"))
    case = seen(step, model, torch.optim.AdamW(model.parameters(), fused=fused))
    (found,) = step_faults(case).values()
    assert f"{line_of(step, 'scaler.step(optimizer)')}" in found.places[0]
    assert "refuses their gradients, because they overflow" in found.says


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_after_a_refusal_of_unscaled_gradients_is_told(fused: bool) -> None:
    model, refusing = net(), unscaling(torch.amp.GradScaler("cpu"))

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        refusing(model, optimizer, x)
        optimizer.step()

    found = step_faults(seen(step, model, torch.optim.AdamW(model.parameters(), fused=fused)))
    assert line_of(step, "optimizer.step()") in found["repeated-update"].places[0]
    assert line_of(refusing, "scaler.step(optimizer)") in found["repeated-update"].places[1]


def test_gradients_that_a_scaler_has_divided_may_be_applied_without_it() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x))).backward()
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()

    assert not step_faults(seen(step))


class ByMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    def loss(self, x: Tensor) -> Tensor:
        return loss_of(self.inner(x))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_step_by_a_method_may_end_with_a_validation(is_wrong: bool) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        model.train(not is_wrong)
        optimizer.zero_grad()
        model.loss(x).backward()  # type: ignore[operator]
        optimizer.step()
        model.train(is_wrong)
        with torch.no_grad():
            model(x)

    assert step_faults(seen(step, ByMethod())).keys() == (
        {"evaluation-mode-in-training"} if is_wrong else set()
    )


class Prototype(nn.Module):
    """Has a weight that gets gradients, which no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.prototype = net(), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.prototype  # type: ignore[no-any-return]


@torch.no_grad()
def averaged(model: Any) -> None:
    model.prototype.mul_(0.99).add_(0.01 * torch.randn(4))


@torch.no_grad()
def clamped(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("move", [averaged, clamped])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_weights_that_are_moved_beside_the_optimizers_have_no_gradients_to_reset(
    move: Callable[[nn.Module], None], every: int
) -> None:
    model, calls = Prototype(), [0]
    head = torch.optim.SGD(model.inner[4].parameters(), 0.1)  # type: ignore[index]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        loss_of(model(x)).backward()
        calls[0] += 1
        if calls[0] % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        move(model)

    assert not step_faults(seen(step, model, head))


def test_gradients_that_are_computed_and_then_given_are_not_added() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        weights = list(model.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(loss_of(model(x)), weights), strict=True):
            weight.grad = gradient
        optimizer.step()

    assert not step_faults(seen(step))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(192, 192), nn.Linear(192, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.g(x.flatten(1)))  # type: ignore[no-any-return]


def _one_for_each(model: Pair) -> tuple[Optimizer, Optimizer]:
    return torch.optim.SGD(model.g.parameters(), 1e-3), torch.optim.SGD(model.d.parameters(), 1e-3)


def test_weights_that_are_frozen_between_the_calls_are_updated_once() -> None:
    model = Pair()
    of_g, of_d = _one_for_each(model)
    model.d.requires_grad_(False)

    def step(model: Any, _: Optimizer, x: Tensor) -> None:
        model.d.requires_grad_(True)
        of_d.zero_grad()
        model.d(model.g(x.flatten(1)).detach()).square().mean().backward()
        of_d.step()
        model.d.requires_grad_(False)
        of_g.zero_grad()
        model(x).square().mean().backward()
        of_g.step()

    assert not step_faults(seen(step, model, of_g))


def test_an_optimizer_that_is_idle_in_some_calls_has_lost_no_gradients() -> None:
    model, calls = Pair(), [0]
    of_g, of_d = _one_for_each(model)

    def step(model: Any, _: Optimizer, x: Tensor) -> None:
        of_g.zero_grad()
        model(x).square().mean().backward()
        of_g.step()
        of_d.zero_grad()
        if calls[0] % 2:
            model.d(model.g(x.flatten(1)).detach()).square().mean().backward()
        calls[0] += 1
        of_d.step()

    assert not step_faults(seen(step, model, of_g))


@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_that_add_up_for_longer_than_is_watched_are_a_note(accumulates: bool) -> None:
    calls = [0]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        if not accumulates:
            optimizer.zero_grad()
        for half in x.repeat(2, 1, 1, 1).chunk(2):
            loss_of(model(half)).backward()
        calls[0] += 1
        if calls[0] % 16 == 0:
            optimizer.step()
            optimizer.zero_grad()

    case = seen(step)
    assert step_faults(case).keys() == (set() if accumulates else {"no-update"})
    assert any("the gradients of all are added up" in note for note in case.notes) is accumulates


def test_a_copy_of_the_model_that_a_step_calls_is_another_model() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        teacher = copy.deepcopy(model).eval()
        optimizer.zero_grad()
        (loss_of(model(x)) + (model(x) - teacher(x)).square().mean()).backward()
        optimizer.step()

    case = seen(step, net().train())
    assert not step_faults(case)
    assert case.steps is not None
    assert case.steps.forwards == 6


def test_a_step_may_save_the_model() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        usual(model, optimizer, x)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        again = torch.load(saved, weights_only=False)
        assert not again._forward_pre_hooks
        assert not again.eval().training

    assert not step_faults(seen(step, net().train()))


@pytest.mark.gpu
def test_what_the_weights_are_compared_with_takes_no_memory_of_a_device() -> None:
    model = nn.Linear(512, 512, device="cuda")
    before = torch.cuda.memory_allocated()
    kept = values_of(model)
    assert torch.cuda.memory_allocated() == before
    assert all(each.device.type == "cpu" for each in kept.values())
