"""The walk through what a value is made of asks nothing of a user's class, and nothing is lost in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from ampopt.ir.moments import Moment, mark_of
from ampopt.ir.parts import is_of_the_process, walk


class Lazy(OrderedDict[str, Any]):
    """A table whose items are made, or imported, where they are asked for."""

    def _load(self) -> NoReturn:
        pytest.fail("its items were asked for")

    items = keys = values = __iter__ = _load


def test_a_dict_s_own_items_are_its_parts() -> None:
    lazy, inner = Lazy(), [1]
    dict.__setitem__(lazy, "inner", inner)
    assert any(part is inner for _, part in walk(lazy))
    before = Moment(lazy, lambda part: False)
    assert before.change_until(Moment(lazy, lambda part: False), by_value=True) is None
    inner.append(2)
    changed = before.change_until(Moment(lazy, lambda part: False), by_value=True)
    assert changed is not None
    assert changed.startswith("['inner']")


class _EqualByName(type):
    """A class of classes without a hash."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and cls.__name__ == other.__name__

    __hash__ = None  # type: ignore[assignment]


class _Slotted(metaclass=_EqualByName):
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = [1.5]


def test_a_class_without_a_hash_has_parts_as_well() -> None:
    for _ in range(2):  # what is known of a class is looked up
        assert [value for path, value in walk(_Slotted(), classes=False) if path == ".held[0]"] == [1.5]
        assert not is_of_the_process(_Slotted())


def test_a_generator_that_did_not_begin_or_is_at_its_end_is_what_it_was() -> None:
    def counted() -> Iterator[int]:
        yield from range(2)

    one = counted()
    new = mark_of(one)
    assert mark_of(one) == new
    next(one)
    assert mark_of(one) != new
    assert mark_of(one) != mark_of(one)  # nothing tells what is left of it
    assert list(one) == [1]
    assert mark_of(one) == mark_of(one) != new
