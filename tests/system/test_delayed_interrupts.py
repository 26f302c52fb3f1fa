"""Ctrl-C in the midst of what is not cut off: it is raised soon after, at the end of the block, and once."""

from __future__ import annotations

import time

import pytest

from ampopt.system import interrupts
from ampopt.system.interrupts import check_interrupted, interruptible, watched
from tests.system.test_interrupts import ctrl_c


class Closing:
    """Ctrl-C strikes while it is left."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *details: object) -> None:
        ctrl_c()


def test_it_is_not_lost_where_the_work_ends_before_it_strikes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, which may run the thread that sends it again seconds later."""
    monkeypatch.setattr(interrupts, "AGAIN_S", 30.0)
    reached = list[str]()
    with watched(), pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        with Closing():
            pass
        reached.append("the end of the work")
    assert reached == ["the end of the work"]


def test_what_was_raised_meanwhile_does_not_strike_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "AGAIN_S", 0.02)
    with watched():
        with pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
            with Closing():
                pass
            check_interrupted()
            pytest.fail("it was held back")
        with interruptible():
            time.sleep(0.2)
        with pytest.raises(KeyboardInterrupt), interruptible():
            ctrl_c()  # another one


def test_it_strikes_again_within_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "AGAIN_S", 0.02)
    reached = list[str]()
    with watched(), pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        with Closing():
            pass
        reached.append("after it")
        time.sleep(2.0)
        pytest.fail("it did not strike again")
    assert reached == ["after it"]
