"""Delays Ctrl-C until it is safe: it is raised in `interruptible` blocks only.

Python raises KeyboardInterrupt between any two instructions: also while a global switch is restored or the
best program is replaced. Within `watched` it is raised in `interruptible` blocks only, and there not while a
context manager is entered or left, an object is finalized or a module is imported: it is then raised some
milliseconds later, or by `check_interrupted` or at the end of the block, whichever comes first. If C++ code
or a finalizer swallows it, or converts it to another exception, these raise it again.

Only the main thread gets signals: in other threads, or if the program has its own signal handler, nothing is
delayed.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ampopt.errors import Interrupted

AGAIN_S = 2e-3
"""Time in seconds after which a delayed interrupt is raised again."""

_WHOLE = frozenset({"__enter__", "__exit__", "__del__", "_find_and_load", "remove"})
"""Functions that are not cut off: what they leave half done cannot be made up for. `remove` is what
dictionaries of weak references call when one of them dies."""


class _Watch:
    """The interruptions of one `watched` block."""

    def __init__(self) -> None:
        self.block: FrameType | None = None
        """The function whose `interruptible` block is being executed."""
        self.is_waiting = False
        """One has struck outside of such a block, or in the midst of what is not cut off."""
        self.is_owed = False
        """One was raised, and has not arrived at the end of its block yet."""
        self._is_sent_again = False
        """The next signal is one that was waiting, sent once more."""
        self._has_ended, self._ending = False, threading.Lock()

    def strike(self, _number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self._is_sent_again:
            self._is_sent_again = False
            if not self.is_waiting:
                return  # `check_interrupted` has raised it meanwhile
            self.is_waiting = False
        if self.block is None:
            self.is_waiting = True
        elif self._is_in_the_midst(frame):
            self.is_waiting = True
            _thread.start_new_thread(self._strike_again, ())  # `threading` takes locks that may be held here
        else:
            self.is_owed = True
            raise KeyboardInterrupt

    def _is_in_the_midst(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self.block:
            if frame.f_code.co_name in _WHOLE:
                return True
            frame = frame.f_back
        return False

    def _strike_again(self) -> None:
        """Send the signal once more, a little later."""
        threading.Event().wait(AGAIN_S)
        with self._ending:
            if not self._has_ended and self.is_waiting:
                self._is_sent_again = True
                _interrupt_main()

    def end(self) -> None:
        """Let nothing strike any more."""
        with self._ending:
            self._has_ended = True


def _interrupt_main() -> None:
    ident = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and ident is not None:
        signal.pthread_kill(ident, signal.SIGINT)  # this also ends a wait in the system
    else:
        _thread.interrupt_main()


_watch: _Watch | None = None


def _current() -> _Watch | None:
    return _watch if threading.current_thread() is threading.main_thread() else None


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Delay Ctrl-C within the block, except in `interruptible` parts; the handler is restored after it.

    A KeyboardInterrupt that leaves the block becomes `Interrupted`.
    """
    global _watch
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    mine = _Watch() if is_default and threading.current_thread() is threading.main_thread() else None
    if mine is not None:
        _watch = mine
        signal.signal(signal.SIGINT, mine.strike)
    try:
        with held():
            yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(
            "interrupted while the model was being prepared: nothing was tried yet, and there is no result"
        ) from error
    finally:
        if mine is not None:
            mine.end()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _watch = None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt within the block, and at once if one is pending."""
    watch = _current()
    if watch is None:
        yield
        return
    before = watch.block
    watch.block = sys._getframe(2)  # beneath this one lies `contextlib`'s
    try:
        check_interrupted()
        yield
        check_interrupted()
    except KeyboardInterrupt:
        watch.is_owed = False
        raise
    except Exception as error:
        check_interrupted(error)
        raise
    finally:
        watch.block = before


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay Ctrl-C until the next `check_interrupted` or block, even inside an `interruptible` block."""
    watch = _current()
    if watch is None:
        yield
        return
    before, watch.block = watch.block, None
    try:
        yield
    finally:
        watch.block = before


def was_interrupted(error: BaseException | None = None) -> bool:
    """Whether `error` is or was caused by a KeyboardInterrupt, or one was delayed or swallowed before."""
    watch = _current()
    if watch is not None and watch.block is not None and (watch.is_owed or watch.is_waiting):
        watch.is_owed = watch.is_waiting = False
        return True
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def check_interrupted(error: BaseException | None = None) -> None:
    """Raise KeyboardInterrupt if `was_interrupted`."""
    if was_interrupted(error):
        raise KeyboardInterrupt from error
