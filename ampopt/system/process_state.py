"""Restores the process state that exporters and compilers change.

Inductor writes its cache's folder into the environment, a default that it computes anew from the same facts;
it raises the recursion limit for its own recursion; and PyTorch's interpreter of graphs makes a lock of
`multiprocessing`, after which the user may not choose how processes are started. Some libraries draw from
`random` or change the filters of warnings when they are imported, and a module of inductor reseeds `random`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

THEIRS = ("TORCH", "_TORCH", "PYTORCH_", "TRITON_", "KMP_", "CUBLAS_", "CUDA_HOME", "CPLUS_INCLUDE_PATH")
"""How the names of the environment variables begin that they set; other threads may set any others."""


@dataclasses.dataclass
class _Kept:
    """What was there before the first of the blocks that overlap."""

    environment: dict[str, str]
    recursion_limit: int
    start_method: str | None

    def put_back(self) -> None:
        for name in _environment().keys() - self.environment.keys():
            os.environ.pop(name, None)
        os.environ.update(self.environment)
        with contextlib.suppress(RecursionError):  # this call is deeper than the limit: it stays raised
            sys.setrecursionlimit(self.recursion_limit)
        default = multiprocessing.get_all_start_methods()[0]
        if self.start_method is None and multiprocessing.get_start_method(allow_none=True) == default:
            multiprocessing.set_start_method(None, force=True)  # nobody has chosen it


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(THEIRS)}


_lock = threading.Lock()
_blocks: list[_Kept] = []


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Leave environment, recursion limit and `multiprocessing` as they were before the block.

    Of blocks that overlap, in several threads, the last one puts back what was there before the first: a
    compiler that works needs what it has set. This decorates functions, too.
    """
    with _lock:
        method = multiprocessing.get_start_method(allow_none=True)
        first = _blocks[0] if _blocks else _Kept(_environment(), sys.getrecursionlimit(), method)
        _blocks.append(first)
    try:
        yield
    finally:
        with _lock:
            _blocks.pop()
            if not _blocks:
                first.put_back()


@contextlib.contextmanager
def imports_kept() -> Iterator[None]:
    """Put back what modules that are loaded in the block do to generators of random numbers and to filters.

    Where none are loaded, nothing is: other threads that draw are not to draw the same numbers again.
    """
    loaded, state, numpys = len(sys.modules), random.getstate(), np.random.get_state()
    filters: Any = warnings.filters
    before = list(filters)
    try:
        yield
    finally:
        if len(sys.modules) != loaded:
            random.setstate(state)
            np.random.set_state(numpys)
            filters[:] = before
