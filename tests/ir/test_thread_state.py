"""What each thread or context has its own of is no constant of a graph."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir import hidden_state
from ampopt.ir.model_copy import private_copy
from ampopt.ir.model_state import behaviour_of

GAIN = contextvars.ContextVar("gain", default=1.0)
LOCAL = threading.local()
X = torch.randn(2, 6)


class Scaled(nn.Module):
    """A linear layer, and a number from elsewhere."""

    level = contextvars.ContextVar("level", default=2.0)

    def __init__(self, gain: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(6, 6), gain
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """The features, scaled."""
        return torch.mul(self.layer(x), self.gain(self))


class Settings:
    """Holds what each thread has its own of."""

    def __init__(self) -> None:
        self.local, self.table = threading.local(), {"gain": contextvars.ContextVar("deep", default=1.0)}


SETTINGS = Settings()


def _in_a_closure() -> Callable[[Any], float]:
    own = threading.local()
    return lambda model: getattr(own, "gain", 1.0)


def reason_of(model: nn.Module) -> str | None:
    with torch.no_grad():
        return behaviour_of(private_copy(model), (X,), {}, torch.device("cpu")).reason


READ = {
    "context variable": (lambda model: GAIN.get(), "the global variable GAIN"),
    "of each thread": (lambda model: getattr(LOCAL, "gain", 1.0), "the global variable LOCAL"),
    "in a closure": (_in_a_closure(), "the variable own of _in_a_closure"),
    "in an object": (lambda model: getattr(SETTINGS.local, "gain", 1.0), "the global variable SETTINGS"),
    "in a dict": (lambda model: SETTINGS.table["gain"].get(), "the global variable SETTINGS"),
    "of a class": (lambda model: model.level.get(), "the class attribute Scaled.level"),
}


@pytest.mark.parametrize("name", READ)
def test_it_is_named(name: str) -> None:
    gain, named = READ[name]
    reason = reason_of(Scaled(gain))
    assert reason is not None
    assert named in reason
    assert reason.endswith("of which each thread or context has its own")


def test_what_a_library_keeps_so_is_its_own_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_state, "is_of_a_library", lambda variables: True)
    assert reason_of(Scaled(READ["context variable"][0])) is None
    assert reason_of(Scaled(READ["in a closure"][0])) is None


def test_a_number_is_none() -> None:
    assert reason_of(Scaled(lambda model: 2.0)) is None
