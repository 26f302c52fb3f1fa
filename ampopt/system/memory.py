"""Returns freed memory to the operating system, which the allocators otherwise keep for this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

import torch


def release(device: torch.device) -> None:
    """Free what lies in cycles, and give unused memory of the heap and of the device's cache back.

    A search allocates and frees many times a model's size. glibc keeps the freed heap: after a search for
    ResNet-18 on two cores, 340 MB. Other C libraries have no such call, and keep what they keep.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # musl has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
