"""Steps that do not move the weights are told with the reason; methods and parts of a model may be called."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.diagnosis.training import YOURS, measure_training
from ampopt.diagnosis.training_step import sgd
from ampopt.errors import InputError
from tests.support.training import Optimizer, case_of, clean, line_of, loss_of, net, seen, step_faults


def usual(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


def by_hand(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    with torch.no_grad():
        for weight in model.parameters():
            assert weight.grad is not None
            weight.sub_(weight.grad, alpha=0.1)


def by_other_numbers(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    weights = list(model.parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(loss_of(model(x)), weights), strict=True):
        weight.data = weight.data - 0.1 * gradient


class NoOptimizer:
    """An optimizer that is none of PyTorch's."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights

    def step(self) -> None:
        for weight in self.weights:
            if weight.grad is not None:
                weight.data.sub_(weight.grad, alpha=0.1)
            weight.grad = None


class Functional:
    """Has the weights itself, as in functional programming."""

    weights: dict[str, Tensor] | None = None

    def __call__(self, model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        found = self.weights or {name: w.detach().clone() for name, w in model.named_parameters()}

        def loss(weights: dict[str, Tensor]) -> Tensor:
            return loss_of(torch.func.functional_call(model, weights, (x,)))

        gradients = torch.func.grad(loss)(found)
        self.weights = {name: weight - 0.1 * gradients[name] for name, weight in found.items()}


def _with_no_optimizer(model: nn.Module) -> Any:
    own = NoOptimizer(list(model.parameters()))

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        loss_of(model(x)).backward()
        own.step()

    return step


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))


@pytest.mark.parametrize(
    "make",
    [lambda _: by_hand, lambda _: by_other_numbers, _with_no_optimizer, lambda _: Functional()],
    ids=["by hand", "by other numbers", "no optimizer", "functional"],
)
def test_weights_that_move_without_an_optimizer_of_pytorchs_move(make: Any) -> None:
    model = linear()
    case = seen(make(model), model)
    assert case.steps is not None
    assert case.steps.calls == 3
    assert not step_faults(case)


def test_gradients_that_add_up_are_told_of_updates_by_hand() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        loss_of(model(x)).backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=0.1)

    assert step_faults(seen(step)).keys() == {"stale-gradients"}


def reset_between(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    optimizer.zero_grad()
    optimizer.step()


def zeroed_between(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


@pytest.mark.parametrize("step", [reset_between, zeroed_between])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_gradients_that_are_reset_before_the_update_are_told(step: Any, decay: float) -> None:
    model = net()
    found = step_faults(seen(step, model, torch.optim.AdamW(model.parameters(), 0.1, weight_decay=decay)))
    assert found.keys() == {"no-update"}
    assert "the gradients are reset between the backward pass and the update" in found["no-update"].says
    assert line_of(step, "optimizer.step()") in found["no-update"].places[0]


def no_backward(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x))
    optimizer.step()


def no_rate(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    usual(model, optimizer, x)


def no_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()


def no_loss(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    (0 * loss_of(model(x))).backward()
    optimizer.step()


def infinite(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    clean(model, optimizer, x * torch.inf)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (no_backward, "no backward pass brings gradients"),
        (no_rate, "their learning rate is 0"),
        (no_step, "gradients come, and no update applies them"),
        (no_loss, "all of their gradients are zero"),
        (infinite, "refuses their gradients, because they overflow"),
    ],
)
def test_weights_that_stand_still_are_a_fault_with_the_reason(step: Any, why: str) -> None:
    found = step_faults(seen(step))
    assert found.keys() == {"no-update"}
    assert found["no-update"].says.startswith("no step moves the weights in ")
    assert why in found["no-update"].says


def test_a_fused_optimizer_refuses_what_overflows_itself() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = step_faults(seen(infinite, model, optimizer))
    assert line_of(clean, "SCALER.step(optimizer)") in found["no-update"].says
    assert not step_faults(seen(clean, model, optimizer))


def test_an_optimizer_of_other_weights_than_those_with_gradients_is_told() -> None:
    model = net()

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model[4](model[3](model[0](x).detach().relu()))).backward()  # type: ignore[index]
        optimizer.step()

    found = step_faults(seen(step, model, torch.optim.SGD(model[0].parameters(), 0.1)))  # type: ignore[index]
    assert "only to some that the optimizer does not have" in found["no-update"].says


def test_a_schedule_that_begins_with_a_rate_of_0_is_none() -> None:
    def warming(model: nn.Module) -> tuple[Optimizer, Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 10)

        def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
            usual(model, optimizer, x)
            schedule.step()

        return optimizer, step

    model = net()
    optimizer, step = warming(model)
    case = seen(step, model, optimizer)
    assert not step_faults(case)
    assert case.steps is not None
    assert case.steps.moves
    case = seen(usual, model, optimizer)  # the schedule advances elsewhere
    assert not step_faults(case)
    assert any("a schedule has set their learning rate to 0" in note for note in case.notes)


def test_updates_that_vanish_in_the_rounding_of_the_weights() -> None:
    model = linear().bfloat16()
    for weight in model.parameters():
        weight.data.fill_(1.0)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        usual(model, optimizer, x.bfloat16())

    found = step_faults(seen(step, model, torch.optim.SGD(model.parameters(), 1e-6)))
    assert "vanish as the weights are rounded" in found["no-update"].says
    case = seen(step, model, sgd)
    assert not step_faults(case)  # the optimizer is not the user's
    assert any("with the optimizer where none is given" in note for note in case.notes)


class Whole(nn.Module):
    """Its steps call methods of it, and parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    def training_step(self, x: Tensor) -> Tensor:
        return loss_of(self.forward(x))


def by_method(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model.training_step(x).backward()  # type: ignore[operator]
    optimizer.step()


def by_parts(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    for part in model.inner:  # type: ignore[union-attr]
        x = part(x)
    loss_of(x).backward()
    optimizer.step()


@pytest.mark.parametrize("step", [by_method, by_parts])
def test_a_step_may_call_methods_and_parts_of_the_model(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.0)
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)
    case = case_of(Whole().train(), step)
    measure_training(case, lambda *_: None)
    assert YOURS in case.times
    assert case.steps is not None
    assert (case.steps.forwards, case.steps.evaluated) == (3, 0)
    assert not step_faults(case)


@pytest.mark.parametrize("part", [by_method, by_parts])
def test_evaluation_mode_is_seen_in_methods_and_parts(part: Any) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        model.eval()
        part(model, optimizer, x)

    found = step_faults(seen(step, Whole()))["evaluation-mode-in-training"]
    assert "in 3 of 3 calls" in found.says
    assert line_of(step, "model.eval()") in found.places[0]


def test_evaluation_mode_is_told_with_the_lines_that_set_it_and_that_call_the_model() -> None:
    def validating(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        usual(model, optimizer, x)
        model.eval()
        with torch.no_grad():
            model(x)

    found = step_faults(seen(validating, net().train()))["evaluation-mode-in-training"]
    assert "in 2 of 3 calls" in found.says
    assert line_of(validating, "model.eval()") in found.places[0]
    assert line_of(usual, "model(x)") in found.places[1]
    (place,) = step_faults(seen(usual, net().eval()))["evaluation-mode-in-training"].places
    assert line_of(usual, "model(x)") in place


def test_evaluation_mode_of_a_copy_that_a_step_makes_is_the_copys() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        usual(model, optimizer, x)
        average = copy.deepcopy(model).eval()
        assert model.training
        assert not average.training

    assert not step_faults(seen(step, net().train()))


def test_why_a_step_fails_is_one_sentence() -> None:
    def failing(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        raise ValueError("It is wrong.")

    with pytest.raises(InputError, match=r"ValueError: It is wrong\. It is called as step"):
        measure_training(case_of(net(), failing), lambda *_: None)
