"""The whole model with its parts is right on its example and on other inputs, whatever its results are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.model_copy import private_copy
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.results import IncomparableError
from ampopt.search.partly_optimized import patched
from ampopt.search.whole_check import WholeCheck
from tests.support.planted import keep_the_patched, optimize

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Det:
    """A detection."""

    a: Any


class Giving(nn.Module):
    """A model that is no single graph and gives what `make` makes of its features."""

    def __init__(self, make: Callable[[Tensor], Any], scale: float = 300.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.scale = scale
        self.make = [make]

    def forward(self, x: Tensor) -> Any:
        """Features that a lower precision changes a lot, in some form."""
        y = self.body(x)
        return self.make[0]((y * self.scale).cos() * (1 + int(y.mean().item() > 1e9)))


def _object(y: Tensor) -> Any:
    made = nn.Identity()
    made.__dict__["found"] = [y]
    return made


MADE: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "dataclass": Det,
    "object": _object,
    "array": lambda y: y.numpy(),
    "float": lambda y: y.sum().item(),
    "list": lambda y: {"a": y.flatten().tolist()},
    "word": lambda y: f"{y.sum():.6f}",
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", MADE)
def test_an_error_over_the_tolerance_is_found_in_results_of_any_kind(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def a_little_wrong(*args: Any) -> nn.Module:
        model = patched(*args)
        body = model.get_submodule("body")
        right = body.forward
        body.forward = lambda x: right(x) * 1.01
        return model

    keep_the_patched(monkeypatch)
    monkeypatch.setattr("ampopt.search.regions.patched", a_little_wrong)
    model = Giving(MADE[how]).eval()
    fast = optimize(model, X, precision="fp32", cache=False)
    assert list(fast.report.regions) == ["body"]
    assert fast.report.chosen == ORIGINAL
    assert any("the original runs: the whole model's error" in note for note in fast.report.notes)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", sorted(MADE.keys() - {"word"}))
def test_results_of_any_kind_are_served_where_they_are_right(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_the_patched(monkeypatch)
    fast = optimize(Giving(MADE[how], scale=1.0).eval(), X, precision="fp32", cache=False)
    assert fast.report.chosen == "fp32", fast.report.notes


@pytest.mark.usefixtures("quick")
def test_results_that_cannot_be_compared_leave_the_call_to_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_the_patched(monkeypatch)
    model = Giving(lambda y: (part for part in y), scale=1.0).eval()
    fast = optimize(model, X, precision="fp32", cache=False)
    assert fast.report.chosen == ORIGINAL
    assert any("cannot be compared" in note and "generator" in note for note in fast.report.notes)
    with torch.no_grad():
        assert torch.equal(torch.stack([*fast(X)]), torch.stack([*model(X)]))


def check_of(model: nn.Module, limit: float = 1e-2) -> WholeCheck:
    return WholeCheck(private_copy(model), (X,), {}, torch.device("cpu"), limit)


def test_a_constant_of_the_example_is_found_by_other_inputs() -> None:
    model = Giving(MADE["dataclass"], scale=1.0).eval()
    check = check_of(model)
    constant = check.call(model)
    error, why = check.judge(lambda x: constant)
    assert error == 0.0
    assert why is not None
    assert why.endswith("at a is over 0.01 on other inputs than the example")
    assert check.judge(model) == (0.0, None)


def test_what_fails_on_other_inputs_only_is_wrong_and_on_the_example_raises() -> None:
    model = Giving(MADE["tensor"], scale=1.0).eval()

    def picky(x: Tensor) -> Any:
        if not torch.equal(x, X):
            raise ValueError("other boxes")
        return model(x)

    why = check_of(model).judge(picky)[1]
    assert why == "it fails on other inputs than the example: ValueError: other boxes"
    with pytest.raises(ZeroDivisionError):
        check_of(model).judge(lambda x: 1 / 0)
    with pytest.raises(IncomparableError):
        check_of(Giving(lambda y: iter([y]))).judge(lambda x: iter([x]))


def test_other_inputs_with_which_the_original_fails_tell_nothing() -> None:
    class Picky(Giving):
        def forward(self, x: Tensor) -> Any:
            if not torch.equal(x, X):
                raise ValueError("another image")
            return super().forward(x)

    model = Picky(MADE["tensor"]).eval()
    constant = check_of(model).call(model)
    assert check_of(model).judge(lambda x: constant) == (0.0, None)


def test_other_inputs_with_which_rounding_decides_tell_nothing() -> None:
    model = Giving(lambda y: (y * 1e9).sin(), scale=1.0).eval()
    nudged = private_copy(model)
    with torch.no_grad():
        next(nudged.parameters()).mul_(1 + 1e-6)
    exact = check_of(model).call(model)

    def answer(x: Tensor) -> Any:
        return exact if torch.equal(x, X) else nudged(x)

    assert check_of(model).judge(answer) == (0.0, None)
    assert check_of(Giving(MADE["tensor"], scale=1.0).eval()).judge(answer)[1] is not None


class Close(nn.Module):
    """Takes one of two rows, by a sum of which float32 loses what is on the other side of the threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))

    def forward(self, x: Tensor) -> Tensor:
        total = (x[0] + x[1]) + x[2]
        return self.rows[1] if total > 1e8 else self.rows[0]


def test_what_the_original_gives_in_float64_is_right_where_its_own_rounding_decides() -> None:
    x = torch.tensor([1e8, 1.0, 1.0])
    model = Close()
    check = WholeCheck(model, (x,), {}, torch.device("cpu"), 1e-2)
    with torch.no_grad():
        assert torch.equal(model(x), model.rows[0])
        exact, between = model.rows[1].clone(), model.rows.mean(0)
        others = model.rows[0].clone()

    def answering(first: Tensor) -> Callable[..., Tensor]:
        return lambda given: first if torch.equal(given, x) else model(given)

    assert check.judge(answering(exact)) == (0.0, None)
    assert check.judge(answering(others)) == (0.0, None)
    error, why = check.judge(answering(between))
    assert error > 0.1
    assert why is not None


def test_a_model_that_cannot_be_called_in_float64_is_compared_with_itself_alone() -> None:
    class Only32(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is not torch.float32:
                raise TypeError("no float64 here")
            return x @ torch.ones(3, 2)

    check = WholeCheck(Only32(), (torch.ones(1, 3),), {}, torch.device("cpu"), 1e-2)
    error, why = check.judge(lambda x: x @ torch.ones(3, 2) * 2)
    assert (error, why is not None) == (1.0, True)


def test_what_a_model_makes_in_float32_is_widened_for_its_result_in_float64() -> None:
    class Makes32(Close):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ torch.eye(2)

    x, model = torch.tensor([1e8, 1.0, 1.0]), Makes32()
    check = WholeCheck(model, (x,), {}, torch.device("cpu"), 1e-2)
    with torch.no_grad():
        exact = model.rows[1].clone()

    def answer(given: Tensor) -> Tensor:
        return exact if torch.equal(given, x) else model(given)

    with torch.no_grad():
        assert not torch.equal(answer(x), model(x))
    assert check.judge(answer) == (0.0, None)
