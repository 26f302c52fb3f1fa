"""Two results are as far apart as the worst of what they are made of."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ampopt.measure.results import IncomparableError, distance, kept


@dataclasses.dataclass
class Found:
    """What a detector returns."""

    boxes: Any
    name: str = "ball"


class Plain:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    """An object without `__dict__`."""

    __slots__ = ("boxes",)

    def __init__(self, boxes: Any) -> None:
        self.boxes = boxes


Pair = collections.namedtuple("Pair", "boxes score")
T = torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        Found,
        Slotted,
        lambda t: Plain(inside=[Found({"a": (t,)})]),
        lambda t: Pair(t, 0.5),
        lambda t: t.numpy(),
        lambda t: t.numpy().astype(np.float16),
        lambda t: t.tolist(),
        lambda t: collections.deque([{"boxes": t}]),
        lambda t: np.array([t, "word"], dtype=object),
        lambda t: functools.partial(max, t),
        lambda t: lambda: t,
        lambda t: (t * 1j).resolve_conj(),
        lambda t: torch.nested.nested_tensor([t]),
        lambda t: torch.diag(t).to_sparse(),
    ],
    ids=lambda make: None,
)
def test_the_error_is_that_of_the_tensor_wherever_it_is(make: Any) -> None:
    assert distance(make(T), make(T.clone())).error == 0.0
    assert distance(make(T), make(T * 1.1)).error == pytest.approx(0.1, rel=1e-2)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("a", "b"),
        (1, 2),
        (True, False),
        (1, 1.0),
        ([T], [T, T]),
        ({"a": T}, {"b": T}),
        ({1, 2}, {1, 3}),
        (Found(T), Found(T, "goal")),
        (Found(T), Plain(boxes=T, name="ball")),
        (Plain(a=T), Plain(a=T, b=T)),
        (T, T.numpy()),
        (T, T.double()),
        (np.ones(2, np.float32), np.ones(2)),
        (np.ones(2), np.ones(3)),
        (np.array(["a"]), np.array(["b"])),
        (T, None),
        (float("nan"), 1.0),
    ],
)
def test_what_is_not_equal_and_has_no_error_is_infinitely_far(expected: Any, found: Any) -> None:
    assert distance(expected, found).error == math.inf
    assert distance(expected, kept(expected)).error == 0.0


def test_floats_of_a_list_are_one_vector_and_alone_they_are_numbers() -> None:
    assert distance([1e-6, 100.0], [2e-6, 100.0]).error < 1e-7
    assert distance(1e-6, 2e-6).error == pytest.approx(1.0)
    assert distance(np.float32(2.0), np.float32(3.0)).error == pytest.approx(0.5)


def test_the_path_to_the_worst_is_told() -> None:
    far = distance({"a": [Found(T), Found(T)]}, {"a": [Found(T), Found(T * 2)]})
    assert str(far) == "1 at ['a'][1].boxes"
    assert str(distance(T, T * 2)) == "1"


def test_a_result_that_holds_itself() -> None:
    def make(tensor: Tensor) -> Plain:
        made = Plain(t=tensor)
        made.__dict__["own"] = made
        return made

    assert distance(make(T), make(T)).error == 0.0
    assert distance(make(T), make(T * 2)).error == 1.0


def _numbers() -> Iterator[int]:
    yield 1


def test_what_cannot_be_looked_into_is_said() -> None:
    with pytest.raises(IncomparableError, match=r"the result holds a generator at \[0\].a, which cannot be"):
        distance([Plain(a=_numbers())], [Plain(a=_numbers())])
    with pytest.raises(IncomparableError, match=r"cannot be compared .*generator"):
        kept([_numbers()])


def test_what_is_kept_does_not_change_with_the_result() -> None:
    result = Found([T.clone()])
    copied = kept(result)
    result.boxes[0].mul_(2.0)
    assert distance(copied, result).error == 1.0
