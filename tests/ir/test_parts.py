"""The walk through what a value is made of asks nothing of a user's class, and nothing is lost in it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

import pytest

from ampopt.ir.moments import Moment
from ampopt.ir.parts import walk


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
