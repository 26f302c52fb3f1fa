"""What a step, a loss and an optimizer reach by variables is the user's own: refused, or as it was."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ampopt.diagnosis.training import measure_training
from ampopt.diagnosis.training_step import Subject, fp32
from ampopt.errors import InputError
from tests.support.training import Optimizer, batch, case_of, loss_of, net

MINE: Any = None
"""A global variable of a script."""


class Held:
    """A class whose attribute a step names."""

    mine: Any = None


class Step:
    """An object that is called as a step."""

    def __call__(self, model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        """A step by a method."""
        _stepping(model, optimizer, x)


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    global MINE
    yield
    MINE = Held.mine = None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.0)
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)


def _trained(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


def _stepping(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    _trained(model, optimizer, x)
    MINE.step()


def _by_a_helper(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    _stepping(model, optimizer, x)


def _clipping(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    _trained(model, optimizer, x)
    nn.utils.clip_grad_norm_(MINE, 1e-3)


def _by_an_attribute(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    _trained(model, optimizer, x)
    MINE.optimizer.step()


def _by_a_class(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    _trained(model, optimizer, x)
    Held.mine.step()


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def _scheduler(model: nn.Module) -> Any:
    return torch.optim.lr_scheduler.StepLR(_sgd(model), 1)


def _file(model: nn.Module) -> types.ModuleType:
    made = types.ModuleType("trainer")
    vars(made).update(optimizer=_sgd(model))
    return made


def _of_another(model: nn.Module) -> Optimizer:
    return _sgd(net())


REACHING: dict[str, tuple[Callable[[nn.Module], Any], Any, str]] = {
    "optimizer": (_sgd, _stepping, "your own SGD by the global variable MINE"),
    "helper": (_sgd, _by_a_helper, "your own SGD by the global variable MINE"),
    "method": (_sgd, Step(), "your own SGD by the global variable MINE"),
    "partial": (_sgd, functools.partial(_stepping), "your own SGD by the global variable MINE"),
    "scheduler": (_scheduler, _stepping, r"your own SGD by the global variable MINE\.optimizer"),
    "of another model": (_of_another, _stepping, "your own SGD by the global variable MINE"),
    "parameters": (lambda m: [*m.parameters()], _clipping, r"Parameter by the global variable MINE\[\d\]"),
    "buffers": (lambda m: dict(m.named_buffers()), _clipping, r"Tensor by the global variable MINE\['1"),
    "object": (lambda m: types.SimpleNamespace(optimizer=_sgd(m)), _by_an_attribute, r"MINE\.optimizer"),
    "file": (_file, _by_an_attribute, r"your own SGD by the global variable MINE\.optimizer"),
    "class": (_sgd, _by_a_class, r"your own SGD by the class attribute Held\.mine"),
}


@pytest.mark.parametrize("kind", REACHING)
def test_a_step_that_names_what_trains_the_users_weights_is_refused(kind: str) -> None:
    global MINE
    make, step, said = REACHING[kind]
    model = net()
    MINE = Held.mine = make(model)
    loss_of(model(batch())).backward()
    before = [(weight.detach().clone(), weight.grad) for weight in model.parameters()]
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    with pytest.raises(InputError, match=f"the step reaches .*{said}.*: write it as step"):
        measure_training(case_of(model, step), lambda *_: None)
    for weight, (own, gradient), numbers in zip(model.parameters(), before, gradients, strict=True):
        assert torch.equal(weight, own)
        assert weight.grad is gradient
        assert gradient is not None
        assert torch.equal(gradient, numbers)


def _penalized(result: Tensor) -> Tensor:
    total: Tensor = loss_of(result) + sum(weight.square().sum() for weight in MINE.parameters())
    return total


def _penalized_by(model: nn.Module, result: Tensor) -> Tensor:
    total: Tensor = loss_of(result) + sum(weight.square().sum() for weight in model.parameters())
    return total


def test_a_loss_that_names_the_model_is_refused_and_one_that_holds_it_is_copied_with_it() -> None:
    global MINE
    MINE = model = net()
    with pytest.raises(
        InputError, match=r"^the loss reaches your own Sequential by the global variable MINE"
    ):
        measure_training(_case(Subject(model, (batch(),), _penalized)), lambda *_: None)
    measure_training(
        _case(Subject(model, (batch(),), functools.partial(_penalized_by, model))), lambda *_: None
    )
    assert all(weight.grad is None for weight in model.parameters())


def _case(subject: Subject) -> Any:
    case = case_of(subject.model)
    case.subject = subject
    return case


def test_a_model_whose_hook_names_it_is_not_trained() -> None:
    global MINE
    MINE = model = net()
    model.register_forward_hook(lambda module, args, result: result * MINE[4].bias.sum())
    with pytest.raises(InputError, match="a copy of the model cannot be trained without yours"):
        measure_training(_case(Subject(model, (batch(),), loss_of)), lambda *_: None)
    assert all(weight.grad is None for weight in model.parameters())


def _groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": model[at].parameters(), "lr": rate} for at, rate in ((0, 0.1), (4, 0.2))]  # type: ignore[index]


def _given(own: Optimizer, _: Any) -> Optimizer:
    return own


FACTORIES: dict[str, Callable[[nn.Module], Callable[[Any], Optimizer]]] = {
    "groups": lambda model: lambda _: torch.optim.SGD(_groups_of(model), momentum=0.9),
    "all": lambda model: lambda _: torch.optim.SGD(model.parameters(), 0.1),
    "the user's own": lambda model: functools.partial(_given, _sgd(model)),
    "both": lambda model: lambda given: torch.optim.SGD([next(iter(given)), model[4].weight], 0.1),  # type: ignore[index]
}


@pytest.mark.parametrize("kind", FACTORIES)
def test_an_optimizer_made_of_the_users_weights_is_one_of_the_copys(kind: str) -> None:
    model = net()
    loss_of(model(batch())).backward()
    before = [(weight.detach().clone(), weight.grad) for weight in model.parameters()]
    training = fp32(Subject(model, (batch(),), loss_of, FACTORIES[kind](model)))
    weights = [weight.detach().clone() for weight in training.model.parameters()]
    training()
    assert all(
        torch.equal(a, b) and a.grad is g for a, (b, g) in zip(model.parameters(), before, strict=True)
    )
    trained = [id(weight) for group in training.optimizer.param_groups for weight in group["params"]]
    assert trained
    assert {*trained} <= {id(weight) for weight in training.model.parameters()}
    for weight, old in zip(training.model.parameters(), weights, strict=True):
        assert torch.equal(weight, old) == (id(weight) not in trained)
    rates = [group["lr"] for group in training.optimizer.param_groups]
    assert rates == ([0.1, 0.2] if kind == "groups" else [0.1])


def test_an_optimizer_of_none_of_the_weights_is_refused() -> None:
    other = net()
    with pytest.raises(InputError, match="has none of the model's parameters: make it of those"):
        fp32(Subject(net(), (batch(),), loss_of, lambda _: _sgd(other)))


def _averaging(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    _trained(model, optimizer, x)
    MINE.update_parameters(model)


def _averaging_by_hand(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    _trained(model, optimizer, x)
    for mean, weight in zip(MINE, model.parameters(), strict=True):
        mean.data.mul_(0.5).add_(weight.data, alpha=0.5)


def _noting(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    _trained(model, optimizer, x)
    MINE["steps"] += 1
    MINE["loss"].mul_(0.9).add_(1)


def _teaching(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    (loss_of(model(x)) + MINE(x).square().mean()).backward()
    optimizer.step()


def _scaling(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    (loss_of(model(x)) * MINE.sum()).backward()
    optimizer.step()
    with torch.no_grad():
        MINE.sub_(MINE.grad)


def _average(model: nn.Module) -> AveragedModel:
    found = AveragedModel(model)
    found.update_parameters(model)
    return found


def _gradient(leaf: Tensor) -> Tensor:
    return leaf.new_zeros(1) if leaf.grad is None else leaf.grad


KEPT: dict[str, tuple[Callable[[nn.Module], Any], Any, Callable[[Any], list[Any]]]] = {
    "average": (_average, _averaging, lambda mine: [*mine.state_dict().values()]),
    "average by hand": (lambda m: [*copy.deepcopy(m).parameters()], _averaging_by_hand, list),
    "numbers": (
        lambda m: {"steps": 3, "loss": torch.ones(1)},
        _noting,
        lambda mine: [torch.tensor(mine["steps"]), mine["loss"]],
    ),
    "gradients": (
        copy.deepcopy,
        _teaching,
        lambda mine: [*map(_gradient, mine.parameters())],
    ),
    "leaf": (lambda _: torch.ones(7, requires_grad=True), _scaling, lambda mine: [mine, _gradient(mine)]),
    "weight": (lambda _: nn.Parameter(torch.ones(7)), _scaling, lambda mine: [mine, _gradient(mine)]),
    "statistics": (copy.deepcopy, _teaching, lambda mine: [mine[1].running_mean]),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_a_step_changes_by_a_variable_is_put_back(kind: str) -> None:
    global MINE
    make, step, look = KEPT[kind]
    model = net()
    MINE = make(model)
    before = [each.clone() for each in look(MINE)]
    measure_training(case_of(model, step), lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(look(MINE), before, strict=True))
    with torch.enable_grad():
        step(model, _sgd(model), batch())
    assert not all(torch.equal(a, b) for a, b in zip(look(MINE), before, strict=True))
