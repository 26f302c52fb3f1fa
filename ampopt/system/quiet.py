"""Suppresses the terminal output of PyTorch's exporters; their exceptions contain the same information.

Only the output of the thread in the block is dropped. Standard streams, logging and warnings belong to the
process, and other threads use them at the same time: `redirect_stdout` would drop their output, and
`catch_warnings` in two threads may leave one's filters in place permanently. So streams, handlers and the
filter list stay the same objects; each gets a filter for quiet threads, which is removed afterwards. Output
of threads started in the block is not dropped, nor is output that C and C++ write to the file descriptors.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

LOGGERS = ("torch", "onnxscript", "onnx_ir")
"""Loggers whose records are dropped, including all loggers below them."""

_lock = threading.Lock()
_said: dict[int, io.StringIO] = {}
"""What each quiet thread says in its innermost block; threads that are in none are not there."""

_undo: list[Callable[[], None]] = []
"""What puts streams, handlers and filters back when no thread is quiet any more."""


@contextlib.contextmanager
def quiet(said: io.StringIO | None = None) -> Iterator[None]:
    """Suppress this thread's output to both standard streams, its warnings, and the exporters' loggers in it.

    The text that it writes to the streams is in `said` afterwards.
    """
    thread, outer = threading.get_ident(), _said.get(threading.get_ident())
    try:
        with _lock:
            _said[thread] = io.StringIO() if said is None else said
            _be_deaf()
        yield
    finally:
        with _lock:
            if outer is not None:
                _said[thread] = outer
            else:
                _said.pop(thread, None)
            while _undo and not _said:
                _undo.pop()()


def _is_quiet() -> bool:
    return threading.get_ident() in _said


def _be_deaf() -> None:
    """Prepare whatever is not prepared yet: a stream or handler may have come since another thread did so."""
    for stream in (sys.stdout, sys.stderr):
        _mute(stream)
    for logger in _loggers():
        for handler in logger.handlers:
            if _is_heard not in handler.filters:
                handler.addFilter(_is_heard)
                _undo.append(lambda handler=handler: handler.removeFilter(_is_heard))  # type: ignore[misc]
    filters: Any = warnings.filters
    if _IGNORED not in filters:
        filters.insert(0, _IGNORED)
        _undo.append(lambda: _heed(filters))


def _mute(stream: Any) -> None:
    """Give a stream a `write` of its own; one that takes no attributes stays as it is, and is heard."""
    own = getattr(stream, "__dict__", {}).get("write")
    if isinstance(own, _Write):
        return
    with contextlib.suppress(AttributeError, TypeError):
        stream.write = new = _Write(stream.write)

        def unmute() -> None:
            if vars(stream).get("write") is not new:
                return  # somebody has put another one in its place
            if own is None:
                del stream.write
            else:
                stream.write = own

        _undo.append(unmute)


def is_muted(stream: object) -> bool:
    """Whether what is written to a stream passes `_Write`; a stream may take none."""
    return isinstance(getattr(stream, "write", None), _Write)


class _Write:
    """A stream's `write` for all but the quiet threads."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def __call__(self, text: str) -> object:
        said = _said.get(threading.get_ident())
        return self._write(text) if said is None else said.write(text)


def _loggers() -> list[logging.Logger]:
    """Those whose handlers the exporters' records may reach: handlers get what loggers below theirs say."""
    known = list(logging.Logger.manager.loggerDict.items())
    theirs = [found for name, found in known if name.partition(".")[0] in LOGGERS]
    return [logging.getLogger(), *(found for found in theirs if isinstance(found, logging.Logger))]


def _is_heard(record: logging.LogRecord) -> bool:
    return not _is_quiet() or record.name.partition(".")[0] not in LOGGERS


class _FromQuietThreads:
    """Stands where a filter of warnings has the pattern that messages must match."""

    def match(self, text: str) -> bool:
        return _is_quiet()


_IGNORED = ("ignore", _FromQuietThreads(), Warning, None, 0)


def _heed(filters: list[object]) -> None:
    """Remove our filter from the list, and from the one that another thread's `catch_warnings` made of it."""
    current: Any = warnings.filters
    for place in (filters, current):
        while _IGNORED in place:
            place.remove(_IGNORED)
