"""The order of keyword arguments is kept where a model can see it, and only there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.keywords import in_order, taken_by_name
from tests.support.planted import captured_of

X = torch.arange(4.0)


class Named(nn.Module):
    """Takes each argument by its name."""

    def forward(self, z: Tensor, a: Tensor, *, key: int = 0) -> Tensor:
        return z - a


class Rest(nn.Module):
    """Sees the order of all but one."""

    def forward(self, z: Tensor, **rest: Tensor) -> Tensor:
        return torch.cat([z, *rest.values()])


class Own(Named):
    """Sees the call before its `forward` does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*kwargs.values())


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        return function(*args, *kwargs.values())

    return seen


class Decorated(Named):
    """Its decorator has the signature of what it decorates, and sees the order."""

    forward = _decorated(Named.forward)


class PositionalOnly(nn.Module):
    """A name that only a position has may be a keyword of the rest, too."""

    def forward(self, z: Tensor, /, **rest: Tensor) -> Tensor:
        return torch.cat([z, *rest.values()])


def hooked(*, before: bool) -> nn.Module:
    model = Named()
    if before:
        model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs), with_kwargs=True)
    else:
        model.register_forward_hook(lambda _, args, kwargs, out: out, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Named(), {"z", "a", "key"}),
        (Rest(), {"z"}),
        (PositionalOnly(), set()),
        (Own(), set()),
        (Decorated(), set()),
        (hooked(before=True), set()),
        (hooked(before=False), set()),
        (nn.ReLU(), {"input"}),
    ],
    ids=["named", "rest", "positional", "own call", "decorated", "hook before", "hook after", "ReLU"],
)
def test_names_are_those_whose_order_only_the_signature_knows(model: nn.Module, names: set[str]) -> None:
    assert taken_by_name(model) == names


def test_torchscript_has_no_names_of_which_that_is_known() -> None:
    assert isinstance(taken_by_name(torch.jit.script(nn.ReLU())), frozenset)


@pytest.mark.parametrize(
    ("kwargs", "ordered"),
    [
        ("", ""),
        ("ba", "ab"),
        ("zy", "zy"),
        ("yz", "yz"),
        ("zbya", "abzy"),
        ("zb", "bz"),
        ("bza", "abz"),
    ],
)
def test_names_are_sorted_and_the_rest_stays_in_the_callers_order(kwargs: str, ordered: str) -> None:
    by_name = frozenset("ab")
    given = {name: name.upper() for name in kwargs}
    found = in_order(given, by_name)
    assert (list(found), found) == (list(ordered), given)
    assert list(in_order(found, by_name)) == list(ordered)


def test_a_capture_keeps_an_order_that_is_seen() -> None:
    _, captured = captured_of(Rest(), b=X + 1, z=X, a=X + 2)
    assert captured.by_name == {"z"}
    assert [float(leaf[0]) for leaf in captured.leaves] == [0.0, 1.0, 2.0]
    (out,) = captured.program.run(X, X + 1, X + 2)
    assert torch.equal(out, torch.cat([X, X + 1, X + 2]))
