"""Sets global PyTorch switches for a `with` block and restores them after it, also after an exception.

cuDNN's and cuBLAS's switches are process-wide, so two threads in different scopes would see each other's
values; a lock allows one scope at a time. A thread that waits for work in another thread lends it its locks.
Calls that replay a CUDA graph need no switches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from typing import Any, TypeVar

import torch

from ampopt.system.turns import switching, this_thread, working_for

_T = TypeVar("_T")


class _Searched(threading.local):
    def __init__(self) -> None:
        self.dtypes = set[torch.dtype]()


searched = _Searched()
"""For each thread the dtypes in which its convolutions may have plans that cuDNN has searched.

PyTorch keeps a thread's plans, whatever its switch for the search says later.
"""


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


@dataclasses.dataclass(frozen=True)
class _Older:
    """What the older interface was last told, also where reading it raises."""

    cudnn: bool
    matmul: bool
    word: str | None
    """Of `torch.set_float32_matmul_precision`, where it can be read."""

    @classmethod
    def now(cls) -> _Older:
        """Reading a flag raises where it differs from the newer ones, so beside "ieee" it raises if it is on.

        Changes the newer flags.
        """
        backends: Any = torch.backends
        word = _readable(torch.get_float32_matmul_precision)
        _set_precision(("ieee",) * 3)
        cudnn = _readable(lambda: backends.cudnn.allow_tf32)
        matmul = _readable(lambda: backends.cuda.matmul.allow_tf32)
        return cls(cudnn is not False, matmul is not False, word)

    def put_back(self) -> None:
        """Changes the newer flags."""
        backends: Any = torch.backends
        backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = self.cudnn, self.matmul
        if self.word == "medium":  # "high" is what a flag that is on means; both tell oneDNN, too
            before = backends.mkldnn.matmul.fp32_precision
            torch.set_float32_matmul_precision(self.word)
            backends.mkldnn.matmul.fp32_precision = before


def _readable(read: Callable[[], _T]) -> _T | None:
    """What it gives; None where PyTorch refuses to tell."""
    try:
        return read()
    except RuntimeError:
        return None


@contextlib.contextmanager
def older_flags_readable() -> Iterator[None]:
    """Make PyTorch's older `allow_tf32` flags readable within the block.

    Where they and the newer flags differ, reading the older ones raises, and `torch.export` reads them. So
    both are off in the block, and what they were afterwards. Nested blocks, and those in which they can be
    read anyway, change nothing.
    """
    backends: Any = torch.backends
    with contextlib.ExitStack() as turn:
        turn.enter_context(switching.taken())
        if _readable(lambda: (backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32)):
            turn.close()  # calls in other threads go on meanwhile
            yield
            return
        before, older = _precision(), None
        try:
            older = _Older.now()
            backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = False
            _set_precision(("ieee",) * 3)  # they would inherit from the one for all
            yield
        finally:
            if older is not None:
                older.put_back()
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
