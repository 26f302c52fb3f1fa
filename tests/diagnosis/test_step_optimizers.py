"""Steps with optimizers of their own: updates are seen, and judged by the gradients of their own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.diagnosis.finding import Finding
from ampopt.diagnosis.training import ONCE, YOURS, TrainingCase, measure_training, ways_of
from ampopt.diagnosis.training_findings import find_in_training
from ampopt.diagnosis.training_step import Subject
from ampopt.errors import InputError
from tests.support.training import Optimizer, batch, case_of, line_of, loss_of, net, watched


def faults(case: TrainingCase) -> dict[str, Finding]:
    return {each.name: each for each in find_in_training(case) if each.is_fault}


def _halves(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model[at].parameters(), 0.1) for at in (0, 4)]  # type: ignore[index]


def _with_its_own(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lambda model, _, x: never_stale(model, optimizer, x)


def _with_one_for_each_half(model: nn.Module) -> Any:
    first, second = _halves(model)

    def step(model: nn.Module, _: Optimizer, x: Tensor) -> None:
        model.zero_grad()
        loss_of(model(x)).backward()
        first.step()
        second.step()

    return step


def _in_turn(model: nn.Module) -> Any:
    """As a discriminator and its generator are trained: the second pass adds to the first one's gradients."""
    first, second = _halves(model)

    def step(model: nn.Module, _: Optimizer, x: Tensor) -> None:
        for each in (first, second):
            each.zero_grad()
            loss_of(model(x)).backward()
            each.step()

    return step


def _making_one(model: nn.Module) -> Any:
    return lambda model, _, x: never_stale(model, torch.optim.SGD(model.parameters(), 0.1), x)


class Around(torch.optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def _around(model: nn.Module) -> Any:
    optimizer = Around(torch.optim.SGD(model.parameters(), 0.1))
    return lambda model, _, x: never_stale(model, optimizer, x)


def never_stale(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


@pytest.mark.parametrize("make", [_with_its_own, _with_one_for_each_half, _in_turn, _making_one, _around])
def test_updates_by_a_steps_own_optimizers_are_seen(make: Any) -> None:
    model = net()
    case = watched(make(model), model)
    assert case.steps is not None
    assert len(case.steps.updates) == (6 if make in (_with_one_for_each_half, _in_turn) else 3)
    assert all(update.is_fresh and update.moved > 0 for update in case.steps.updates)
    assert not faults(case)


def test_weights_of_a_steps_own_optimizer_are_not_told_to_cost_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.0)
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)
    model = net()
    first, _ = _halves(model)
    case = case_of(model, _with_one_for_each_half(model), first)
    measure_training(case, lambda *_: None)
    assert not case.spare
    case = case_of(model, optimizer=first)
    measure_training(case, lambda *_: None)
    assert case.spare == ["1.weight", "1.bias", "4.weight", "4.bias"]


def test_a_steps_own_optimizer_that_updates_twice_is_named_with_both_lines() -> None:
    model = net()
    first, second = _halves(model)

    def step(model: nn.Module, _: Optimizer, x: Tensor) -> None:
        model.zero_grad()
        loss_of(model(x)).backward()
        first.step()  # once
        second.step()
        first.step()  # again

    case = watched(step, model)
    found = faults(case)["repeated-update"]
    assert [place.partition(",")[0] for place in found.places] == [
        line_of(step, "again"),
        line_of(step, "once"),
    ]
    assert ONCE in ways_of(case)


class Heads(nn.Module):
    """Two heads on one body, each for its own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Flatten()
        self.heads = nn.ModuleList(nn.Linear(192, 4) for _ in range(2))

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](self.body(x))  # type: ignore[no-any-return]


def _one_for_each(heads: Heads, rates: tuple[float, float] = (0.1, 0.1)) -> list[Optimizer]:
    return [torch.optim.SGD(h.parameters(), rate) for h, rate in zip(heads.heads, rates, strict=True)]


@pytest.mark.parametrize("to_none", [True, False])
def test_an_update_without_gradients_repeats_nothing(to_none: bool) -> None:
    model, calls = Heads(), [0]
    optimizers = _one_for_each(model)

    def step(model: nn.Module, _: Optimizer, x: Tensor) -> None:
        for each in optimizers:
            each.zero_grad(set_to_none=to_none)
        loss_of(model(x, calls[0] % 2)).backward()
        calls[0] += 1
        for each in optimizers:
            each.step()

    case = watched(step, model)
    assert case.steps is not None
    assert (len(case.steps.updates), case.steps.idle) == (3, 3)
    assert not faults(case)
    assert ONCE not in ways_of(case)


def test_a_step_whose_weights_never_get_gradients_is_called_as_often_as_others() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        loss_of(model(x))
        optimizer.step()

    case = watched(step, net())
    assert case.steps is not None
    assert (case.steps.forwards, case.steps.idle) == (3, 3)
    assert "no backward pass brings gradients to them" in faults(case)["no-update"].says


def test_a_scaler_refuses_the_gradients_of_its_own_optimizer_alone() -> None:
    model, scaler = Heads(), torch.amp.GradScaler("cpu")
    first, second = _one_for_each(model)

    def step(model: nn.Module, _: Optimizer, x: Tensor) -> None:
        for each in (first, second):
            each.zero_grad()
        scaler.scale(loss_of(model(x)) * torch.inf).backward()
        scaler.step(first)
        scaler.update()
        loss_of(model(x, 1)).backward()
        second.step()

    assert not faults(watched(step, model))


def test_gradients_that_are_new_after_a_refusal_are_not_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x)) * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        never_stale(model, optimizer, x)

    assert not faults(watched(step, net()))


def _scaled_and_not(model: nn.Module, *, is_wrong: bool) -> Any:
    scaler = torch.amp.GradScaler("cpu")
    first, second = _one_for_each(model)  # type: ignore[arg-type]

    def step(model: nn.Module, _: Optimizer, x: Tensor) -> None:
        for each in (first, second):
            each.zero_grad()
        scaler.scale(loss_of(model(x))).backward()
        loss_of(model(x, 1)).backward()
        second.step()  # of a loss that was not scaled
        if is_wrong:
            first.step()  # of one that was
        else:
            scaler.step(first)
            scaler.update()

    return step


def test_gradients_of_a_scaled_loss_are_those_of_its_backward_pass() -> None:
    model = Heads()
    assert not faults(watched(_scaled_and_not(model, is_wrong=False), model))
    step = _scaled_and_not(model, is_wrong=True)
    found = faults(watched(step, model))
    assert found.keys() == {"scaled-gradients"}
    assert line_of(step, "first.step()") in found["scaled-gradients"].places[0]


def test_gradients_that_a_scaler_has_divided_are_scaled_no_longer() -> None:
    model, scaler = Heads(), torch.amp.GradScaler("cpu")
    first, second = _one_for_each(model)

    def step(model: nn.Module, _: Optimizer, x: Tensor) -> None:
        for each in (first, second):
            each.zero_grad()
        scaler.scale(loss_of(model(x)) + loss_of(model(x, 1))).backward()
        scaler.unscale_(second)
        second.step()  # divided
        first.step()  # not
        scaler.update()

    found = faults(watched(step, model))
    assert found.keys() == {"scaled-gradients"}
    assert line_of(step, "first.step()") in found["scaled-gradients"].places[0]


def test_an_update_with_stale_gradients_is_compared_with_its_own_optimizers() -> None:
    model = Heads()
    first, second = _one_for_each(model, (1e-6, 1e-3))

    def step(model: nn.Module, _: Optimizer, x: Tensor) -> None:
        first.zero_grad()
        (loss_of(model(x)) + loss_of(model(x, 1))).backward()
        first.step()
        second.step()

    says = faults(watched(step, model))["stale-gradients"].says
    _, _, figure = says.partition("update 3 moves the weights ")
    assert 1 < float(figure.partition(" times as far as the first")[0]) < 4


def test_stale_gradients_without_an_update_to_compare_with_have_no_figure() -> None:
    model = Heads()
    (_, second), both = _one_for_each(model), torch.optim.SGD(model.parameters(), 1e-6)

    def step(model: nn.Module, _: Optimizer, x: Tensor) -> None:
        both.zero_grad()
        (loss_of(model(x)) + loss_of(model(x, 1))).backward()
        both.step()
        loss_of(model(x, 1)).backward()
        second.step()

    assert "moves the weights" not in faults(watched(step, model))["stale-gradients"].says


def by_closure(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


class Asserting(torch.optim.SGD):
    """As those that look at two places before they go anywhere: its signature does not tell."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it needs a closure"
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        super().step()
        return loss


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Asserting])
@pytest.mark.parametrize("is_made", [False, True])
def test_an_optimizer_that_calls_a_closure_is_timed_with_one(
    kind: Any, is_made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.0)
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)
    model = net()
    case = case_of(model, by_closure, kind if is_made else kind(model.parameters()))
    measure_training(case, lambda *_: None)
    assert {"fp32", "amp", YOURS} <= case.times.keys()
    assert case.times["fp32"].parts["optimizer"] > 0
    assert case.steps is not None
    assert [update.is_fresh for update in case.steps.updates] == [True] * 3
    assert not faults(case)


def test_a_closure_is_called_once_in_each_timed_step_of_an_optimizer_that_needs_it() -> None:
    calls: list[int] = []

    def counted(result: Tensor) -> Tensor:
        calls.append(1)
        return loss_of(result)

    training = Subject(net(), (batch(),), counted, Asserting).copied()
    training.loss = counted
    training()
    assert len(calls) == 2  # that it needs one shows in the first step
    assert float(training()) > 0
    assert len(calls) == 3


def test_an_optimizer_that_fails_with_a_closure_too_says_why() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no")

    with pytest.raises(InputError, match="a training step fails: ValueError: no"):
        measure_training(case_of(optimizer=Failing), lambda *_: None)
