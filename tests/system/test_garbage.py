"""garbage: it is not collected during a block, and is again after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ampopt.system.garbage import collected_later


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
