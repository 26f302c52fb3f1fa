"""A counter is state wherever it is, also where no attribute has it; what tells of the last call is none."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.model_copy import private_copy
from ampopt.ir.model_state import behaviour_of

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")

COUNT = 0
COUNTS = {"calls": 0}
RARE = 1000
"""Every so many calls a result is another: more than anybody looks at."""


def reason_of(model: nn.Module) -> str | None:
    with torch.no_grad():
        return behaviour_of(private_copy(model.eval()), (X,), {}, CPU).reason


class Counting(nn.Module):
    """Doubles the features of every so many frames; `tick` counts them."""

    calls = 0

    def __init__(self, tick: Callable[[Any], int]) -> None:
        super().__init__()
        self.body, self.tick = nn.Linear(6, 6), tick
        self.aside = [nn.Module()]
        self.aside[0].calls = 0  # type: ignore[assignment]
        self.box: dict[str, Any] = {"step": _in_a_closure()}

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        y: Tensor = self.body(x)
        return y * 2 if self.tick(self) % RARE == RARE - 1 else y


def _in_a_closure() -> Callable[[], int]:
    calls = 0

    def step() -> int:
        nonlocal calls
        calls += 1
        return calls

    return step


def _by_default(model: Any, calls: list[int] = [0]) -> int:  # noqa: B006
    calls[0] += 1
    return calls[0]


def _with_attribute() -> Callable[[Any], int]:
    def step(model: Any) -> int:
        step.calls += 1  # type: ignore[attr-defined]
        return step.calls  # type: ignore[attr-defined, no-any-return]

    step.calls = 0  # type: ignore[attr-defined]
    return step


def _global(model: Any) -> int:
    global COUNT
    COUNT += 1
    return COUNT


def _in_a_global_dict(model: Any) -> int:
    COUNTS["calls"] += 1
    return COUNTS["calls"]


def _of_the_class(model: Any) -> int:
    Counting.calls += 1
    return Counting.calls


class Track:
    """A tracked object: each has a number of its own."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.number = type(self).made


def _of_a_class_that_it_makes(model: Any) -> int:
    return Track().number


def _aside(model: Any) -> int:
    model.aside[0].calls += 1
    return model.aside[0].calls  # type: ignore[no-any-return]


def _by_dict(model: Any) -> int:
    model.mine = model.__dict__.get("mine", 0) + 1
    return model.mine  # type: ignore[no-any-return]


def _numbers() -> Callable[[Any], int]:
    numbers = itertools.count()
    return lambda model: next(numbers)


TICKS: dict[str, tuple[Callable[[], Callable[[Any], int]], str]] = {
    "closure": (
        lambda: lambda model: model.box["step"](),
        "state from call to call in its box['step']<calls>",
    ),
    "default": (lambda: _by_default, "changes"),
    "a function's attribute": (_with_attribute, "in its tick.calls"),
    "iterator": (_numbers, "in its tick<numbers>"),
    "global variable": (lambda: _global, "it changes the global variable COUNT when it is called"),
    "global dict": (lambda: _in_a_global_dict, "it changes the global variable COUNTS['calls'] when"),
    "class": (lambda: _of_the_class, "it changes the class attribute Counting.calls when it is called"),
    "class of what it makes": (
        lambda: _of_a_class_that_it_makes,
        "it changes the class attribute Track.made when it is called",
    ),
    "module in a list": (lambda: _aside, "in its aside[0].calls"),
    "by __dict__": (lambda: _by_dict, "in its attribute mine"),
}


class Tracker:
    """An object that a class holds."""

    def count(self) -> int:
        """Counts calls in a global variable."""
        return _global(self)


class WithTracker(nn.Module):
    """Calls an object that is an attribute of its class."""

    tracker = Tracker()

    def forward(self, x: Tensor) -> Tensor:
        """Twice as much, rarely."""
        return x * 2 if self.tracker.count() % RARE == RARE - 1 else x


class CountingConv(nn.Conv2d):
    """Counts in a method that PyTorch's own code calls."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _ = _in_a_global_dict(self)
        y: Tensor = super()._conv_forward(x, weight, bias)
        return y


@pytest.mark.parametrize("where", TICKS)
def test_a_counter_is_state_wherever_it_is(where: str) -> None:
    make, told = TICKS[where]
    reason = reason_of(Counting(make()))
    assert reason is not None
    assert told in reason


def test_a_hook_that_counts_keeps_a_state() -> None:
    model, seen = nn.Sequential(nn.Linear(6, 6)), [0]

    def hook(module: Any, args: Any, y: Tensor) -> Tensor:
        seen[0] += 1
        return y * 2 if seen[0] % RARE == RARE - 1 else y

    model[0].register_forward_hook(hook)
    reason = reason_of(model)
    assert reason is not None
    assert "<seen>[0]" in reason


def test_what_only_tells_of_the_last_call_is_no_state() -> None:
    features: dict[str, Any] = {}

    def hook(module: Any, args: Any, y: Tensor) -> None:
        features.update(last=y.detach(), shape=y.shape, mean=float(y.mean()))

    model = nn.Sequential(nn.Linear(6, 6))
    model[0].register_forward_hook(hook)
    assert reason_of(model) is None


def test_what_the_first_call_makes_is_no_state() -> None:
    tables: dict[int, Tensor] = {}

    def tick(model: Any) -> int:
        tables.setdefault(1, torch.ones(2))
        COUNTS.setdefault("table", 1)
        return 0

    with contextlib.ExitStack() as stack:
        stack.callback(COUNTS.pop, "table")
        assert reason_of(Counting(tick)) is None


def test_what_has_another_address_in_a_copy_is_no_state() -> None:
    class Thing:
        """An object that is printed with its address."""

    things, keyed, numbers = {Thing(), 1}, {Thing(): 1, len: 2}, iter([Thing(), Thing()])

    def tick(model: Any) -> int:
        assert things
        assert keyed
        assert numbers is not None
        return 0

    assert reason_of(Counting(tick)) is None


def test_an_object_of_a_class_and_a_method_that_pytorch_calls_are_looked_through() -> None:
    reason = reason_of(WithTracker())
    assert reason is not None
    assert "the global variable COUNT when" in reason
    conv = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), CountingConv(1, 1, 2))
    with torch.no_grad():
        reason = behaviour_of(private_copy(conv.eval()), (X,), {}, CPU).reason
    assert reason is not None
    assert "the global variable COUNTS['calls'] when" in reason


def _in_a_file(name: str) -> Any:
    """A module of a user's that counts calls."""
    made = types.ModuleType(name)
    code = "COUNT = 0\ndef tick(model):\n    global COUNT\n    COUNT += 1\n    return COUNT"
    exec(compile(code, f"{name}.py", "exec"), vars(made))
    return made


def test_variables_of_one_name_in_two_files_are_two() -> None:
    left, right = _in_a_file("left"), _in_a_file("right")

    def tick(model: Any) -> int:
        if model.training:
            return int(left.tick(model))
        return int(right.tick(model))

    reason = reason_of(Counting(tick))
    assert reason is not None
    assert "it changes the global variable COUNT" in reason
