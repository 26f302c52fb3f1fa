"""Restores the process state that exporters and compilers change.

Inductor writes its cache folder into the environment, a default that it can always compute again; it raises
the recursion limit for its own recursion; and PyTorch's graph interpreter creates a lock of
`multiprocessing`, after which the user cannot set the start method of processes. OpenVINO's compiler and
ONNX Runtime's sessions switch off that the processor flushes denormal numbers. Some libraries draw from
`random` or change the warning filters when they are imported, and a module of inductor reseeds `random`.
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
"""Prefixes of the environment variables that they set; other threads may set any others."""


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
    """Restore environment, recursion limit, `multiprocessing` and this thread's denormals after the block.

    If blocks overlap in several threads, the last one to end restores the state before the first, because a
    running compiler needs its settings. Also a decorator for functions.
    """
    flushes = _flushes_denormals()
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
        if _flushes_denormals() != flushes:
            import torch  # a bundle is imported without it

            torch.set_flush_denormal(flushes)


def _flushes_denormals() -> bool:
    """Whether this thread takes numbers below the least normal one for 0, see `torch.set_flush_denormal`."""
    return float(np.float32(1e-40) * np.float32(1.0)) == 0.0


@contextlib.contextmanager
def imports_kept() -> Iterator[None]:
    """Restore random generators and warning filters that modules imported in the block change.

    If no module is imported, nothing is restored, so that other threads do not draw the same numbers again.
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
