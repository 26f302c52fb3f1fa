"""once: several threads that ask first get one value."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ampopt.system.once import once


def test_of_several_threads_one_computes() -> None:
    barrier, made = threading.Barrier(8), list[object]()

    @once
    def value() -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    def ask(_: int) -> object:
        barrier.wait()
        return value()

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, range(8)))
    assert list(found) == made


def test_what_failed_is_tried_again() -> None:
    attempts = list[int]()

    @once
    def value() -> int:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("busy")
        return 7

    with pytest.raises(OSError, match="busy"):
        value()
    assert (value(), value(), len(attempts)) == (7, 7, 2)
