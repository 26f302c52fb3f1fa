"""garbage: it is not collected during a block, and is again after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ampopt
from ampopt.system.garbage import collected_later, old_left_aside


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    before = gc.isenabled()
    gc.enable()
    yield
    if not before:
        gc.disable()


def test_it_is_collected_again_after_the_last_of_the_blocks_that_overlap() -> None:
    first, second = collected_later(), collected_later()
    with first:
        assert not gc.isenabled()
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_an_error_in_the_block_does_not_leave_it_off() -> None:
    with pytest.raises(ZeroDivisionError), collected_later():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_who_has_disabled_it_finds_it_disabled() -> None:
    gc.disable()
    with collected_later():
        pass
    assert not gc.isenabled()


@pytest.fixture
def nothing_aside() -> Iterator[None]:
    """Other tests set objects aside, for their collections to be quick."""
    gc.unfreeze()
    yield
    gc.freeze()


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def _held() -> weakref.ref[_Cycle]:
    cycle = _Cycle()
    return weakref.ref(cycle)


@pytest.mark.usefixtures("nothing_aside")
def test_what_is_old_is_left_aside_until_the_last_of_the_blocks_ends_and_what_is_new_is_collected() -> None:
    gc.collect()
    gc.disable()
    garbage, kept = _held(), [_Cycle()]
    old = weakref.ref(kept[0])
    with old_left_aside():
        assert garbage() is None
        kept.clear()
        with old_left_aside():
            new = _held()
            gc.collect()
            assert new() is None
        gc.collect()
        assert old() is not None
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


@pytest.mark.usefixtures("nothing_aside")
def test_who_has_set_objects_aside_finds_them_so() -> None:
    gc.freeze()
    with old_left_aside():
        pass
    assert gc.get_freeze_count() > 0


@pytest.mark.usefixtures("nothing_aside")
@pytest.mark.parametrize("search", [ampopt.optimize, ampopt.compare, ampopt.diagnose])
def test_a_search_leaves_old_objects_aside_and_gives_them_back(search: Callable[..., Any]) -> None:
    garbage, kept = _held(), [_Cycle()]
    old = weakref.ref(kept[0])
    gc.callbacks.append(watch := _Watch(kept))
    try:
        search(torch.nn.Linear(2, 2).eval(), torch.ones(1, 2), budget_s=0.5)
    finally:
        gc.callbacks.remove(watch)
    assert watch.collections > 1
    assert (old() is None, garbage() is None) == (False, True)
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


class _Watch:
    """Makes garbage of what it keeps before the second full collection, and counts them."""

    def __init__(self, kept: list[_Cycle]) -> None:
        self.kept, self.collections = kept, 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            self.collections += 1
            if self.collections == 2:
                self.kept.clear()
