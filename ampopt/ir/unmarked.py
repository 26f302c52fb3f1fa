"""A tensor's memory for readers outside of PyTorch, which stays as it is.

`tensor.numpy()` marks the memory for good: no tensor in it can be resized, or lead elsewhere, afterwards.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from torch import Tensor


def bytes_of(tensor: Tensor) -> bytes:
    """A copy of the bytes of a contiguous tensor of the CPU."""
    return bytes(_memory(tensor))


def array_of(tensor: Tensor) -> Any:
    """An array in the memory of a contiguous tensor of the CPU, which lives as long as the array."""
    dtype = tensor.detach().new_empty(0).numpy().dtype
    return np.ndarray(tuple(tensor.shape), dtype, _memory(tensor))


def _memory(tensor: Tensor) -> Any:
    memory: Any = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memory
