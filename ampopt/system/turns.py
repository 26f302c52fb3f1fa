"""Locks for work that one thread at a time may do: optimize, capture, set PyTorch's global switches.

A thread that has several turns has taken them in this order, or two threads could wait for each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turn:
    """Taken by one thread at a time, by the same one again and again; others wait, and Ctrl-C ends that."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn for the block, or for calls of the function that this decorates.

        A thread that works for one that has it, see `working_for`, has it, too.
        """
        if self._holder in _waiting_threads():
            yield
            return
        with self._lock:
            before, self._holder = self._holder, threading.get_ident()
            try:
                yield
            finally:
                self._holder = before


optimizing, capturing, switching = Turn(), Turn(), Turn()
"""Of whole calls of `optimize` and `compare`, because what is timed beside another decides nothing; of
exporters, tracers and compilers, see `ampopt.ir.capturing`; and of cuDNN's and cuBLAS's switches."""

_here = threading.local()


def _waiting_threads() -> tuple[int, ...]:
    """Those that wait for what this thread does."""
    waiting: tuple[int, ...] = getattr(_here, "waiting", ())
    return waiting


def this_thread() -> tuple[int, ...]:
    """This thread, and those that wait for it: what `working_for` takes."""
    return (*_waiting_threads(), threading.get_ident())


@contextlib.contextmanager
def working_for(threads: tuple[int, ...]) -> Iterator[None]:
    """Use the turns of `threads` in this one; they wait until the block ends."""
    before, _here.waiting = _waiting_threads(), threads
    try:
        yield
    finally:
        _here.waiting = before
