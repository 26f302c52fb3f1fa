"""Numbers that calls write in place are put back, whoever writes them, and only where they are others."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ampopt.ir.outside import variables_kept

HELD: Any = None
IS_MADE = False


class Writing(nn.Module):
    """Calls a function of its own."""

    def __init__(self, write: Callable[[], Any]) -> None:
        super().__init__()
        self.write = write

    def forward(self) -> None:
        """Nothing but the write."""
        self.write()


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    global HELD, IS_MADE
    yield
    HELD, IS_MADE = None, False
    vars(helper).clear()


def helper() -> None:
    """A function with attributes."""


def _normalize() -> None:
    HELD(torch.randn(4, 3) + 5)


def _add_to_data() -> None:
    HELD.data.add_(1)


def _add_in_numpy() -> None:
    HELD.numpy()[...] += 1


def _add_one() -> None:
    HELD[0] += 1


def _replace() -> None:
    global HELD
    HELD = HELD + 1


def _make() -> None:
    global IS_MADE
    HELD[...] = 7
    IS_MADE = True


def _make_by_data() -> None:
    global IS_MADE
    HELD.data.fill_(7)
    IS_MADE = True


def _count() -> None:
    vars(helper)["count"] = getattr(helper, "count", 0) + 1


WRITES: dict[str, tuple[Callable[[], Any], Callable[[], None], Callable[[Any], Any]]] = {
    "batch norm": (lambda: nn.BatchNorm1d(3), _normalize, lambda held: held.running_mean.tolist()),
    "data": (lambda: torch.zeros(2, 3).T, _add_to_data, lambda held: held.tolist()),
    "NaN": (lambda: torch.tensor([torch.nan, 1]), _add_to_data, repr),
    "NumPy": (lambda: torch.zeros(3), _add_in_numpy, lambda held: held.tolist()),
    "array": (lambda: np.zeros((2, 3)), _add_one, lambda held: held.tolist()),
    "array of NaN": (lambda: np.array([1, np.nan]), _add_one, repr),
    "array in a dict": (lambda: {0: np.zeros(3)}, _add_one, repr),
    "another array": (lambda: np.zeros(3), _replace, repr),
    "bytearray": (lambda: bytearray(2), _add_one, bytes),
    "Python's array": (lambda: array.array("d", [1, 2]), _add_one, list),
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_calls_write_in_place_is_put_back(kind: str) -> None:
    global HELD
    make, write, look = WRITES[kind]
    HELD = mine = make()
    before = look(HELD)
    model = Writing(write)
    with variables_kept(model):
        model()
        assert look(HELD) != before
    assert look(HELD) == before
    assert HELD is mine


def test_a_function_loses_the_numbers_that_calls_have_added_to_it() -> None:
    model = Writing(_count)
    with variables_kept(model):
        model()
        assert vars(helper) == {"count": 1}
    assert not vars(helper)
    vars(helper)["count"] = 5
    with variables_kept(model):
        model()
    assert vars(helper) == {"count": 5}


@pytest.mark.parametrize(
    ("make", "write"), [(lambda: np.zeros(3), _make), (lambda: torch.zeros(3), _make_by_data)]
)
def test_a_table_that_is_filled_stays_beside_the_flag_that_it_is(make: Any, write: Any) -> None:
    global HELD
    HELD = make()
    model = Writing(write)
    with variables_kept(model):
        model()
    assert (HELD.tolist(), IS_MADE) == ([7, 7, 7], True)


def test_what_is_not_written_to_is_not_written_back() -> None:
    global HELD
    fixed = np.array([1.0, np.nan])
    fixed.flags.writeable = False
    HELD = {0: 1, "fixed": fixed, "tensor": torch.tensor([torch.nan])}
    version = HELD["tensor"]._version
    model = Writing(_add_one)
    with variables_kept(model):
        model()
    assert HELD[0] == 1
    assert HELD["tensor"]._version == version
