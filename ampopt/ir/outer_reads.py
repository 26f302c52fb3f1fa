"""What functions of C read of the world outside of the process: the clock, files, sockets.

A graph has it for a constant, and the results of a few calls need not show it: a timeout is over only later,
and a file is written another day. A time that is only measured counts, too: nothing proves that no branch
depends on it.
"""

from __future__ import annotations

import datetime
import io
import os
import socket
import time
from types import BuiltinFunctionType

import numpy as np

_CLOCKS = frozenset(
    getattr(time, f"{name}{unit}")
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
    for unit in ("", "_ns")
    if hasattr(time, f"{name}{unit}")
) | {os.times, time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime}

_DATES = ("now", "utcnow", "today")

_LOOKS = (
    *(open, io.open_code, os.open, os.read, os.stat, os.lstat, os.access, os.listdir, os.scandir),
    *(os.path.exists, os.path.lexists, os.path.isfile, os.path.isdir, os.path.islink, np.fromfile),
)
_FILES = frozenset(each for each in _LOOKS if isinstance(each, BuiltinFunctionType))
"""Functions of C that look at files; which of them Python has in C depends on the system."""

_STREAMS = (io.FileIO, io.BufferedReader, io.BufferedRandom, io.TextIOWrapper, socket.socket)

_CLOCK, _FILE, _STREAM = "the clock", "files", "a stream"


def what_is_read(function: BuiltinFunctionType) -> str | None:
    """What a function of C reads of the world, and its name, "the clock (time.time)"; None for most."""
    name, of = function.__name__, function.__self__
    if function in _CLOCKS:
        return f"{_CLOCK} (time.{name})"
    if function in _FILES:
        return f"{_FILE} ({name})"
    if name in _DATES and isinstance(of, type) and issubclass(of, datetime.date):
        return f"{_CLOCK} ({of.__name__}.{name})"
    if name.startswith(("read", "recv")) and isinstance(of, _STREAMS):
        return f"{_STREAM} ({type(of).__name__}.{name})"
    return None
