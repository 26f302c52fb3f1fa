"""Computes a value once in a process, whichever thread asks first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def once(function: Callable[[], T]) -> Callable[[], T]:
    """The function, which runs at the first call: of several threads one runs it, and the others wait.

    `functools.cache` runs it in each of them: an operator registered twice is another one the second time.
    """
    cached, lock = functools.cache(function), threading.RLock()

    @functools.wraps(function)
    def call() -> T:
        with lock:
            return cached()

    return call
