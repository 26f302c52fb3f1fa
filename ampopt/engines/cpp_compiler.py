"""Prepares inductor's C++ compiler in a thread of its own while a graph is traced.

Before its first kernel inductor compiles a file for each instruction set of the processor, precompiles its
headers, and reads all of Triton for the key of a cache: 15 s in empty caches on two cores, and little of that
is Python. What is in its caches is not made again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch

from ampopt.engines.merged_kernels import merged_kernels
from ampopt.system.quiet import quiet

NOTHING = 'extern "C" void kernel() {}'
"""A kernel that asks for everything and is not compiled, because nobody waits for it."""


@contextlib.contextmanager
def prepared_compiler(device: torch.device) -> Iterator[None]:
    """Prepare the compiler for a CPU during the block, which ends after that; once in a process.

    `torch._inductor.compile_fx` has to be there: two threads that load its modules may wait for each other.
    """
    if device.type != "cpu":
        yield
        return
    thread = _thread()
    try:
        yield
    finally:
        thread.join()


@functools.cache
def _thread() -> threading.Thread:
    thread = threading.Thread(target=_prepare, daemon=True)
    thread.start()
    return thread


def _prepare() -> None:
    with contextlib.suppress(Exception), quiet(), merged_kernels():  # the first kernel tells why not
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import CacheBase

        AsyncCompile().cpp_pybinding([], NOTHING)
        CacheBase.get_system()
