"""Locks for work that one thread at a time may do: optimize, capture, set PyTorch's global switches.

A thread that needs several locks takes them in this order; otherwise there could be a deadlock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turn:
    """A reentrant lock: other threads wait, and Ctrl-C interrupts the wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None

    @contextlib.contextmanager
    def taken(self, *, waits: bool = True) -> Iterator[None]:
        """Hold the lock for the block, or for calls of the decorated function.

        A thread that works for the holder, see `working_for`, holds it, too. Not `waits`: raise
        BlockingIOError if another thread holds it.
        """
        if self._holder in _waiting_threads():
            yield
            return
        if not self._lock.acquire(blocking=waits):
            raise BlockingIOError("another thread optimizes a model at this moment")
        try:
            before, self._holder = self._holder, threading.get_ident()
            try:
                yield
            finally:
                self._holder = before
        finally:
            self._lock.release()


optimizing, capturing, switching = Turn(), Turn(), Turn()
"""The three locks, in the order of taking them.

`optimizing`: whole calls of `optimize` and `compare`, because concurrent timings are invalid. `capturing`:
exporters, tracers and compilers, see `ampopt.ir.capturing`. `switching`: cuDNN's and cuBLAS's switches.
"""

_here = threading.local()


def _waiting_threads() -> tuple[int, ...]:
    """Those that wait for what this thread does."""
    waiting: tuple[int, ...] = getattr(_here, "waiting", ())
    return waiting


def this_thread() -> tuple[int, ...]:
    """This thread, and those that wait for it: the argument of `working_for`."""
    return (*_waiting_threads(), threading.get_ident())


@contextlib.contextmanager
def working_for(threads: tuple[int, ...]) -> Iterator[None]:
    """Use the locks of `threads` in this thread; they wait until the block ends."""
    before, _here.waiting = _waiting_threads(), threads
    try:
        yield
    finally:
        _here.waiting = before
