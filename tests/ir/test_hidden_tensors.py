"""A tensor that calls replace by an equal one is state; so is a container that two ways lead to."""

from __future__ import annotations

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


def reason_of(model: nn.Module) -> str | None:
    with torch.no_grad():
        return behaviour_of(private_copy(model.eval()), (X,), {}, CPU).reason


REMEMBERED = torch.zeros(2, 6)


class Memory:
    """An object of a user's, with a tensor that calls replace."""

    frame = torch.zeros(2, 6)

    def __init__(self) -> None:
        self.frame = torch.zeros(2, 6)


class Slotted:
    """The same, without a dict."""

    __slots__ = ("frame",)

    def __init__(self) -> None:
        self.frame = torch.zeros(2, 6)


class Recalling(nn.Module):
    """Adds the frame that came with the last command 7: no example gives one."""

    def __init__(self, recall: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.recall, self.memory, self.slotted = nn.Linear(6, 6), recall, Memory(), Slotted()
        self.aside = [nn.Module()]
        self.aside[0].frame = torch.zeros(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        """The features, and what was remembered."""
        y: Tensor = self.body(x)
        return y + self.recall(self, x)


def _taken(x: Tensor, held: Tensor) -> Tensor:
    return torch.where(x.sum() == 7e6, x, held)


def _by_object(model: Any, x: Tensor) -> Tensor:
    model.memory.frame = _taken(x, model.memory.frame)
    return model.memory.frame  # type: ignore[no-any-return]


def _in_place(model: Any, x: Tensor) -> Tensor:
    model.memory.frame.copy_(_taken(x, model.memory.frame))
    return model.memory.frame  # type: ignore[no-any-return]


def _by_slot(model: Any, x: Tensor) -> Tensor:
    model.slotted.frame = _taken(x, model.slotted.frame)
    return model.slotted.frame  # type: ignore[no-any-return]


def _by_module_aside(model: Any, x: Tensor) -> Tensor:
    model.aside[0].frame = _taken(x, model.aside[0].frame)
    return model.aside[0].frame  # type: ignore[no-any-return]


def _by_global(model: Any, x: Tensor) -> Tensor:
    global REMEMBERED
    REMEMBERED = _taken(x, REMEMBERED)
    return REMEMBERED


def _by_other_class(model: Any, x: Tensor) -> Tensor:
    Memory.frame = _taken(x, Memory.frame)
    return Memory.frame


def _by_other_module(model: Any, x: Tensor) -> Tensor:
    held_elsewhere.frame = _taken(x, held_elsewhere.frame)  # type: ignore[attr-defined]
    return held_elsewhere.frame  # type: ignore[no-any-return]


held_elsewhere = types.ModuleType("held_elsewhere")
held_elsewhere.frame = torch.zeros(2, 6)  # type: ignore[attr-defined]


def _in_a_list() -> Callable[[Any, Tensor], Tensor]:
    held = [torch.zeros(2, 6)]

    def recall(model: Any, x: Tensor) -> Tensor:
        held[0] = _taken(x, held[0])
        return held[0]

    return recall


def _coupled(model: Any, x: Tensor) -> Tensor:
    memory, is_new = model.memory, (x.sum() == 7e6).expand(2, 6).clone()
    memory.frame = torch.where(is_new, x, memory.frame)
    memory.valid = is_new | memory.__dict__.get("valid", torch.zeros(2, 6, dtype=torch.bool))
    return torch.where(memory.valid, memory.frame, torch.zeros_like(x))


def _normalized(model: Any, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(_by_object(model, x), (6,))


def _written_and_seen_anew(model: Any, x: Tensor) -> Tensor:
    model.memory.frame = model.memory.frame[:].copy_(_taken(x, model.memory.frame))
    return model.memory.frame  # type: ignore[no-any-return]


def _through_data(model: Any, x: Tensor) -> Tensor:
    model.memory.frame.data = _taken(x, model.memory.frame)
    return model.memory.frame  # type: ignore[no-any-return]


RECALLS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "object": (_by_object, "in its memory.frame"),
    "object, in place": (_in_place, "in its memory.frame"),
    "object, two that need each other": (_coupled, "in its memory."),
    "object, by its norm": (_normalized, "in its memory.frame"),
    "object, by a view": (_written_and_seen_anew, "in its memory.frame"),
    "object, by .data": (_through_data, "in its memory.frame"),
    "object with slots": (_by_slot, "in its slotted.frame"),
    "closure's list": (_in_a_list(), "in its recall<held>[0]"),
    "module in a list": (_by_module_aside, "in its aside[0].frame"),
    "global variable": (_by_global, "in the global variable REMEMBERED"),
    "class that a method names": (_by_other_class, "in the class attribute Memory.frame"),
    "another module's variable": (_by_other_module, "in the global variable held_elsewhere.frame"),
}


@pytest.mark.parametrize("where", RECALLS)
def test_a_tensor_that_calls_replace_by_equal_ones_is_state(where: str) -> None:
    recall, told = RECALLS[where]
    reason = reason_of(Recalling(recall))
    assert reason is not None
    assert f"it keeps a state from call to call {told}" in reason


def test_a_tensor_that_calls_set_before_they_read_it_is_no_state() -> None:
    def recall(model: Any, x: Tensor) -> Tensor:
        model.memory.frame = torch.zeros(2, 6)
        Memory.frame = torch.ones(2, 6)
        return model.memory.frame + Memory.frame  # type: ignore[no-any-return]

    assert reason_of(Recalling(recall)) is None


def test_a_tensor_that_is_seen_anew_in_each_call_is_no_state() -> None:
    def recall(model: Any, x: Tensor) -> Tensor:
        model.memory.frame = model.memory.frame[:]
        return model.memory.frame  # type: ignore[no-any-return]

    assert reason_of(Recalling(recall)) is None


class Holder(nn.Module):
    """Replaces what a container holds by the input, where that is large."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        """The new contents."""
        self.held["h"] = torch.where(x.mean() > 1e3, x, self.held["h"])
        return self.held["h"]


class TwoWays(nn.Module):
    """Reads a container of a submodule by a way of its own."""

    def __init__(self, wrap: Callable[[dict[str, Tensor]], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.holder = Holder({"h": torch.zeros(2, 6)})
        self.own, self.read = wrap(self.holder.held), read

    def forward(self, x: Tensor) -> Tensor:
        """What the submodule holds, twice."""
        return self.holder(x) + self.read(self.own)  # type: ignore[no-any-return]


def _closed_over(held: dict[str, Tensor]) -> Callable[[], Tensor]:
    return lambda: held["h"]


WAYS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], Callable[[Any], Tensor], str]] = {
    "attribute": (lambda held: held, lambda own: own["h"], "own"),
    "list": (lambda held: [held], lambda own: own[0]["h"], "own[0]"),
    "pair": (lambda held: (held, held), lambda own: own[1]["h"], "own[0]"),
    "closure": (_closed_over, lambda own: own(), "own<held>"),
}


@pytest.mark.parametrize("where", WAYS)
def test_a_container_of_state_with_two_ways_to_it_is_told(where: str) -> None:
    wrap, read, way = WAYS[where]
    reason = reason_of(TwoWays(wrap, read))
    assert reason is not None
    assert "it keeps a state in a container that is both its" in reason
    assert way in reason
