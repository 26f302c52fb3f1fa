"""Sets global PyTorch switches for a `with` block and restores them after it, also after an exception.

cuDNN's and cuBLAS's switches are process-wide, so two threads in different scopes would see each other's
values; a lock allows one scope at a time. A thread that waits for work in another thread lends it its locks.
Calls that replay a CUDA graph need no switches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from typing import Any, TypeVar

import torch

from ampopt.system.turns import switching, this_thread, working_for

_T = TypeVar("_T")


def work_elsewhere(pool: Executor, work: Callable[[], _T]) -> _T:
    """Run `work` in a thread of `pool` and wait for it; it may use this thread's locks."""

    me = this_thread()

    def with_lent_turns() -> _T:
        with working_for(me):
            return work()

    with switching.taken():
        future = pool.submit(with_lent_turns)
        try:
            return future.result()
        finally:
            wait([future])  # also after Ctrl-C: the turn is not given on while work still uses it


def _set_precision(values: tuple[str, str, str]) -> None:
    """Set the FP32 precision of matrix products, convolutions and recurrent layers.

    Only this newer of PyTorch's two interfaces can be put back exactly: writing the older `allow_tf32`
    leaves states behind in which reading it raises. All three are set together, because the older flag
    cannot be read while convolutions and recurrent layers differ.
    """
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = values[0]
    backends.cudnn.conv.fp32_precision = values[1]
    backends.cudnn.rnn.fp32_precision = values[2]


def _precision() -> tuple[str, str, str]:
    backends: Any = torch.backends
    return (
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cudnn.rnn.fp32_precision,
    )


def rounds_to_tf32(device: torch.device) -> bool:
    """Whether the process lets a device round FP32 to TF32; PyTorch's default lets CUDA's convolutions."""
    if device.type != "cuda":
        return False
    with switching.taken():
        return "tf32" in _precision()


@contextlib.contextmanager
def older_flags_readable() -> Iterator[None]:
    """Make PyTorch's older `allow_tf32` flags readable within the block.

    If the user (or `cuda_math`) has set the newer flags, reading the older ones raises in some versions, and
    `torch.export` reads them. So the older flags are written, which makes both agree, and the newer ones are
    restored afterwards. The flags' values have no effect while nothing is computed.
    """
    backends: Any = torch.backends
    try:
        _ = backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    except RuntimeError:
        pass
    else:
        yield
        return
    with switching.taken():
        before = _precision()
        backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = False
        try:
            yield
        finally:
            _set_precision(before)


@contextlib.contextmanager
def cuda_math(*, tf32: bool, search: bool) -> Iterator[None]:
    """Set TF32 on or off, and cuDNN's algorithm search on or off, for the block."""
    cudnn = torch.backends.cudnn
    with switching.taken():
        before_precision, before_search = _precision(), cudnn.benchmark
        _set_precision(("tf32" if tf32 else "ieee",) * 3)
        cudnn.benchmark = search
        try:
            yield
        finally:
            cudnn.benchmark = before_search
            _set_precision(before_precision)
