"""A fast path for calls of plain tensors: check them, run the program, build the result.

A `Quick` is the fast path of a program for tensors that are like examples. For a captured graph of one tensor
it is C++ (`cpp/quick_call.cpp`), compiled on the machine where it runs: after a wait for the GPU the
processor's caches are cold, and every line of Python takes up to ten times as long as in a loop.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import logging
import sysconfig
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ampopt.errors import first_line
from ampopt.system.native import CompilerError, library

logger = logging.getLogger("ampopt")

Answer = Callable[..., Any]
"""Answers tensors of one signature; returns `NotImplemented` for others."""

Quick = Callable[[Callable[..., bool], Callable[[tuple[Tensor, ...]], Any]], Answer]
"""Makes an answer from two functions: one recognizes tensors, one builds the result of flat outputs."""


@runtime_checkable
class HasQuickCall(Protocol):
    """The interface of an engine with a fast path for one tensor: a function of flat tensors."""

    dtypes: tuple[torch.dtype, ...]
    """The dtypes of its flat outputs."""

    def quick(
        self, example: Tensor, otherwise: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """The fast path for tensors that differ from the example in values only; `otherwise`: the full path.

        Nothing is converted before or after it, and PyTorch's settings are not set.
        """


MOST_OUTPUTS = 31
"""Largest number of flat outputs that the C++ code supports."""


def plain(run: Callable[..., tuple[Tensor, ...] | None]) -> Quick:
    """The `Quick` that calls `run`, which returns None for a call that it does not handle."""

    def make(same: Callable[..., bool], restore: Callable[[tuple[Tensor, ...]], Any]) -> Answer:
        def answer(*things: Any) -> Any:
            outputs = run(*things) if same(*things) else None
            return NotImplemented if outputs is None else restore(outputs)

        return answer

    return make


_compiling = threading.Lock()


def _library() -> str:
    """The compiled code; while one thread compiles it, others wait. Raises CompilerError."""
    include = sysconfig.get_path("include")
    with _compiling:
        return str(library("quick_call.cpp", f"MOST_OUTPUTS={MOST_OUTPUTS}", includes=(include,)))


def bind_ahead() -> None:
    """Compile what `bind` needs during other work, in a thread that mostly waits for the compiler."""

    def compile_it() -> None:
        with contextlib.suppress(Exception):  # `bind` meets it again, and tells
            _library()

    threading.Thread(target=compile_it, daemon=True).start()


@functools.cache
def bind() -> Callable[[tuple[object, ...]], Answer] | None:
    """The C++ function in `cpp/quick_call.cpp` that makes answers, see `Part` there.

    None if it does not compile.
    """
    try:
        file = _library()
        loader = importlib.machinery.ExtensionFileLoader("quick_call", file)
        spec = importlib.machinery.ModuleSpec("quick_call", loader, origin=file)
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (CompilerError, ImportError) as error:
        logger.info(
            "ampopt: calls of CUDA graphs go through Python, a few microseconds longer: %s", first_line(error)
        )
        return None
    made: Callable[[tuple[object, ...]], Answer] = module.bind
    return made
