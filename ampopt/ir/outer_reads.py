"""What a model's code reads of the world outside of the process: the clock, files, sockets.

A graph has it for a constant, and the results of a few calls need not show it: a timeout is over only later,
and a file is written another day. So what counts is that the code reads, in a call after its first; what the
first call reads (a table that it loads) is set as all that first calls set. A time that is only measured
counts, too: nothing proves that no branch depends on it.

Not seen are reads in other threads, and functions that C code calls, not Python: a `partial` of a clock.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import os
import socket
import sys
import time
from collections.abc import Iterator
from types import BuiltinFunctionType, FrameType
from typing import Any

import numpy as np

from ampopt.ir.asked import watching_calls
from ampopt.ir.place_in_code import place_of_line

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

_FOR_THEMSELVES = frozenset(
    {"logging", "warnings", "importlib", "_frozen_importlib", "_frozen_importlib_external", "linecache"}
    | {"traceback", "inspect", "cProfile", "profile", "pstats", "torch", "ampopt", "tqdm", "loguru"}
    | {"rich", "structlog", "absl", "wandb", "tensorboard"}
)
"""Packages whose reads are their own affair: the time of a log's record, the lines that a warning shows."""

_FOR_OTHERS = frozenset({*sys.stdlib_module_names, "numpy"})
"""Packages that read for whoever calls them: `Path.read_text`, `np.load`; of PyTorch's, `torch.load` does."""


_CLOCK, _FILE, _STREAM = "the clock", "files", "a stream"


class OuterReads:
    """The reads that are noted in some calls of a model."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Within the block, note what the code of this thread reads.

        No garbage is collected meanwhile: what is called then, by whomever, is called from the model's lines.
        """

        def watch(frame: FrameType, event: str, what: Any) -> None:
            if event == "c_call" and (read := _what_is_read(what)) and (reader := _reader(frame)):
                place = place_of_line(reader.f_code.co_filename, reader.f_lineno)
                self._found[f"it reads {read}" + (f" at {place}" if place else "")] = None

        collects = gc.isenabled()
        gc.disable()
        try:
            with watching_calls(watch):
                yield
        finally:
            if collects:
                gc.enable()

    @property
    def reason(self) -> str | None:
        """Why the model is not one graph: the first of these reads; None if there is none."""
        return next(iter(self._found), None)


def _what_is_read(function: object) -> str | None:
    """What a function of C reads of the world, and its name; None for most."""
    if not isinstance(function, BuiltinFunctionType):
        return None
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


def _reader(frame: FrameType | None) -> FrameType | None:
    """The innermost call of a model's code that a read is for; None if a library reads for itself."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        root = name.partition(".")[0]
        if name != "torch.serialization" and root in _FOR_THEMSELVES:
            return None
        if name != "torch.serialization" and root not in _FOR_OTHERS:
            return frame
        frame = frame.f_back
    return None
