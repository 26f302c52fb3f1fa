"""Page-locked host memory, to which a GPU copies results several times faster than to pageable memory.

The module uses the CUDA runtime that this process has already loaded, and links nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

MOST_BLOCKS = 4
"""Limit of page-locked blocks, which are scarce: further results are copied to pageable memory."""

_TO_HOST, _PORTABLE = 2, 1  # cudaMemcpyDeviceToHost, cudaHostAllocPortable


def cuda_runtime() -> Any | None:
    """The loaded CUDA runtime, or None if there is none or it cannot be found (not on Linux)."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else []
    loaded = [line.split(maxsplit=5)[-1] for line in lines if "/libcudart.so" in line]
    if not loaded:
        return None
    runtime = ctypes.CDLL(loaded[0])
    runtime.cudaHostAlloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint]
    runtime.cudaFreeHost.argtypes = [ctypes.c_void_p]
    runtime.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return runtime


class HostCopies:
    """Copies of one device buffer of a fixed size, each in separate memory.

    The memory is page-locked for up to `MOST_BLOCKS` copies that are alive at a time. A block is reused when
    no array refers to it.
    """

    def __init__(self, runtime: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._runtime, self._shape, self._dtype = runtime, shape, dtype
        self._bytes = math.prod(shape) * dtype.itemsize
        self._free: deque[int] = deque()  # its methods are atomic: blocks come back from any thread
        self._made = 0

    def copy(self, pointer: int) -> np.ndarray[Any, np.dtype[Any]]:
        """A copy of the data at a device address, after all work that writes it has finished.

        Raises RuntimeError if CUDA fails.
        """
        address = self._block()
        if address is None:
            found = np.empty(self._shape, self._dtype)
        else:
            found = np.asarray(_Block(self._free, address, self._shape, self._dtype))
        if status := self._runtime.cudaMemcpy(found.ctypes.data, pointer, self._bytes, _TO_HOST):
            self._runtime.cudaGetLastError()
            raise RuntimeError(f"cudaMemcpy to the host failed with CUDA error {status}")
        return found

    def _block(self) -> int | None:
        """The address of a free block, None where there is none."""
        if self._free:
            return self._free.popleft()
        if self._made == MOST_BLOCKS or not self._bytes:
            return None
        address = ctypes.c_void_p()
        if self._runtime.cudaHostAlloc(ctypes.byref(address), self._bytes, _PORTABLE):
            self._runtime.cudaGetLastError()  # else the next who asks, PyTorch perhaps, takes it for its own
            return None
        self._made += 1
        return address.value

    def __del__(self) -> None:
        """Free the blocks; those that arrays still refer to are kept until the process ends."""
        while self._free:
            self._runtime.cudaFreeHost(self._free.popleft())


class _Block:
    """What NumPy makes an array of, and keeps as long as one shows this memory."""

    def __init__(self, free: deque[int], address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._free, self._address = free, address
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        self._free.append(self._address)
