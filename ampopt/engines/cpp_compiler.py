"""Prepares inductor's C++ compiler in a process of its own while others trace a graph.

Before its first kernel inductor compiles a file for each instruction set of the processor and precompiles its
headers: 12 s in empty caches, in which nothing else happens. What this process has made, others find in
inductor's cache. It is no thread, because inductor's tests of instruction sets change what all threads have.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Iterator

from ampopt.engines.merged_kernels import merged_kernels
from ampopt.system.children import start_child

NOTHING = 'extern "C" void kernel() {}'
"""A kernel that asks for all that kernels need."""

COMPILERS = 2
"""So that inductor does not compile a kernel before somebody waits for it, which nobody does."""


@contextlib.contextmanager
def prepared_compiler() -> Iterator[None]:
    """Prepare the compiler during the block, once for a process; what is not done at its end is given up."""
    child = started()
    try:
        yield
    finally:
        if child is not None and child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@functools.cache
def started() -> subprocess.Popen[bytes] | None:
    """The process that prepares; None where none can be started: the first kernel does it then."""
    try:
        return start_child(__name__, cores=COMPILERS) if os.name == "posix" else None
    except OSError:  # no memory or no process left
        return None


if __name__ == "__main__":
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    with config.patch(compile_threads=COMPILERS), merged_kernels():
        AsyncCompile().cpp_pybinding([], NOTHING)
