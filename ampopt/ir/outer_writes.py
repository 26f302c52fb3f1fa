"""What others see of a model's code beside its results: it writes, starts threads, or tells something.

A graph does none of it: it happens while the model is captured, and never again. What others wait for (a file
that is open, a socket, a pipe, a queue, a database), and what is computed in another thread, needs the code.
What is only told to whoever looks (`print`, logging, warnings) does not.
"""

from __future__ import annotations

import io
import mmap
import queue
import socket
from types import BuiltinFunctionType, FrameType

import numpy as np

STARTS, WRITES, READS = range(3)
"""The kinds of deeds; of several, the first says best why a model is not one graph."""

Deed = tuple[int, str]
"""Its kind, and what code does, as a verb."""

_STREAMS = (
    *(io.FileIO, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, io.TextIOWrapper),
    *(socket.socket, mmap.mmap, queue.SimpleQueue),
)
_WRITING = ("write", "send", "put", "truncate", "connect")
"""How the names of methods begin by which streams, sockets and queues are written to."""

_METHODS = {
    "execute": ("sqlite3", "asks a database"),
    "executemany": ("sqlite3", "asks a database"),
    "executescript": ("sqlite3", "asks a database"),
    "commit": ("sqlite3", "asks a database"),
    "writerow": ("_csv", "writes a table"),
    "writerows": ("_csv", "writes a table"),
    "write": ("_ssl", "writes to a socket"),
}
"""Methods of other classes of C: the module of the class, and what is done."""

_BY_SYSTEM = (
    *("write", "writev", "pwrite", "pwritev", "sendfile", "truncate", "ftruncate", "remove", "unlink"),
    *("rename", "replace", "mkdir", "rmdir", "link", "symlink", "mkfifo", "chmod", "chown", "utime"),
)
_FUNCTIONS: dict[str, Deed] = {
    "_thread.start_new_thread": (STARTS, "starts a thread"),
    "_thread.start_joinable_thread": (STARTS, "starts a thread"),
    "_posixsubprocess.fork_exec": (STARTS, "starts a process"),
    "_winapi.CreateProcess": (STARTS, "starts a process"),
    **{
        f"{system}.{name}": (STARTS, "starts a process")
        for system in ("posix", "nt")
        for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "startfile", "spawnv")
    },
    **{
        f"{system}.{name}": (WRITES, f"writes to files (os.{name})")
        for system in ("posix", "nt")
        for name in _BY_SYSTEM
    },
    "posix.kill": (WRITES, "sends a signal (os.kill)"),
    "posix.killpg": (WRITES, "sends a signal (os.killpg)"),
    "_pickle.dump": (WRITES, "writes an object (pickle.dump)"),
}
"""Functions of C by their modules and names."""

_IN_PYTHON = {
    "put": {
        "queue": (WRITES, "puts into a queue"),
        "multiprocessing.queues": (WRITES, "puts into a queue"),
    },
    "save": {"torch.serialization": (WRITES, "writes to files (torch.save)")},
    "submit": {
        "concurrent.futures.thread": (STARTS, "gives work to another thread"),
        "concurrent.futures.process": (STARTS, "gives work to another process"),
    },
    "run_until_complete": {"asyncio.base_events": (STARTS, "runs an event loop (asyncio)")},
    "call_soon_threadsafe": {"asyncio.base_events": (STARTS, "gives work to another thread")},
}
"""Functions in Python, by their names and modules."""

TELLING = {
    **dict.fromkeys(("logging", "loguru", "structlog", "absl", "wandb", "tensorboard"), "logs"),
    **dict.fromkeys(("tqdm", "rich", "traceback"), "prints"),
    "warnings": "warns",
}
"""Packages that tell whoever looks, and what code does that calls them."""


def done_by_function(function: BuiltinFunctionType) -> Deed | None:
    """What a function of C does that others wait for, "writes to a stream (FileIO.write)"; None for most."""
    name, of = function.__name__, function.__self__
    if name.startswith(_WRITING) and isinstance(of, _STREAMS):
        return WRITES, f"writes to a stream ({type(of).__name__}.{name})"
    if name == "tofile" and isinstance(of, np.ndarray):
        return WRITES, "writes to files (tofile)"
    if name in _METHODS:
        module, does = _METHODS[name]
        if any(kind.__module__ == module for kind in type(of).__mro__):
            return WRITES, f"{does} ({type(of).__name__}.{name})"
    return _FUNCTIONS.get(f"{function.__module__}.{name}")


def done_in_python(frame: FrameType) -> Deed | None:
    """The same of a call of a function in Python."""
    modules = _IN_PYTHON.get(frame.f_code.co_name)
    return None if modules is None else modules.get(str(frame.f_globals.get("__name__")))
