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
    old = _held()
    with old_left_aside():
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
    gc.disable()  # that it is not collected before
    old = _held()
    gc.callbacks.append(watch := _Watch(old))
    try:
        search(torch.nn.Linear(2, 2).eval(), torch.ones(1, 2), budget_s=0.5)
    finally:
        gc.callbacks.remove(watch)
    assert watch.there
    assert all(watch.there)
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


class _Watch:
    """Notes after each full collection whether an object is still there."""

    def __init__(self, old: weakref.ref[_Cycle]) -> None:
        self.old, self.there = old, list[bool]()

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.there.append(self.old() is not None)
