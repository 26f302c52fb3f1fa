"""The example call: what a model does that fails on it, or ends Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import InputError
from ampopt.ir.model_copy import private_copy
from ampopt.search.example_call import mode_note
from tests.support.norms import training

VERBS: list[Callable[..., Any]] = [ampopt.optimize, ampopt.compare, ampopt.diagnose]
X = torch.ones(2, 4)


class Ending(nn.Module):
    """Raises `error` in every call after so many."""

    def __init__(self, error: type[BaseException], *args: object, after: int = 0) -> None:
        super().__init__()
        self.linear, self.raised, self.left = nn.Linear(4, 3), (error, args), [after]

    def __deepcopy__(self, memo: dict[int, Any]) -> Ending:
        own = Ending(self.raised[0], *self.raised[1]).train(self.training)
        own.left = self.left  # calls of copies count, too
        own.load_state_dict(self.state_dict())
        return own

    def forward(self, x: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise self.raised[0](*self.raised[1])
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ((SystemExit, 5), "SystemExit: 5"),
        ((KeyError, "a"), "KeyError: 'a'"),
        ((AssertionError,), "AssertionError"),
        ((ValueError, "no such size"), "no such size"),
    ],
)
def test_what_fails_or_ends_python_is_told(
    verb: Callable[..., Any], error: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(InputError, match=rf"^Ending fails on the example inputs: {said}$"):
        verb(Ending(*error).eval(), X, budget_s=1, progress=False)


def test_an_exit_is_told_where_the_inputs_are_inferred() -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            sys.exit("usage: net IMAGE")

    with pytest.raises(InputError, match=r"cannot be inferred: .*SystemExit: usage: net IMAGE"):
        ampopt.optimize(Net(nn.Conv2d(3, 4, 3)).eval(), budget_s=1, progress=False)


@pytest.mark.parametrize("verb", VERBS)
def test_an_exit_in_a_later_call_is_an_error_too(verb: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="SystemExit: 5"):
        verb(Ending(SystemExit, 5, after=2).eval(), X, budget_s=1, progress=False)


def test_a_step_of_training_that_exits_is_an_error() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        sys.exit(5)

    with pytest.raises(InputError, match="SystemExit: 5"):
        ampopt.diagnose(nn.Linear(4, 3), X, train=True, step=step, budget_s=1, progress=False)


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_in_the_model_goes_through(verb: Callable[..., Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        verb(Ending(KeyboardInterrupt).eval(), X, budget_s=1, progress=False)


def test_modules_that_train_in_any_mode_are_told() -> None:
    norms = [training(nn.BatchNorm1d, 3) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 3), norms[0], nn.Dropout()).eval()
    told = (
        "1 of the model's 4 modules is in training mode: what was measured and optimized is evaluation mode"
    )
    left = ", but for 1 (AdaptingBatchNorm1d), which eval() leaves as it is"
    assert mode_note(model, private_copy(model)) == told + left
    assert ampopt.optimize(model, X, budget_s=1e-6).report.notes[0] == told + left
    model.append(norms[1]).train()
    told = "the model is in training mode: what was measured is evaluation mode"
    left = ", but for 1 (AdaptingBatchNorm1d) and 1 more, which eval() leaves as they are"
    assert mode_note(model, private_copy(model), "measured") == told + left
    assert mode_note(model[0].train(), private_copy(model[0]), "measured") == told
