"""A tensor's memory for readers outside of PyTorch, which stays as it is.

`tensor.numpy()` marks the memory for good: no tensor in it can be resized, or lead elsewhere, afterwards.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> bytes:
    """A copy of the bytes of a contiguous tensor of the CPU."""
    return bytes(_memory(tensor))


def array_of(tensor: Tensor) -> Any:
    """An array in the memory of a contiguous tensor of the CPU, which lives as long as the array."""
    return np.ndarray(tuple(tensor.shape), _in_numpy(tensor.dtype), _memory(tensor))


@functools.cache
def _in_numpy(dtype: torch.dtype) -> Any:
    """NumPy's name of a dtype: to ask for it takes longer than all else."""
    return torch.empty(0, dtype=dtype).numpy().dtype


def _memory(tensor: Tensor) -> Any:
    memory: Any = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memory
