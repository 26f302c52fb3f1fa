"""Returns freed memory to the operating system, which the allocators otherwise keep for this process."""

from __future__ import annotations

import torch

from ampopt.system.heap import trim_heap


def release(device: torch.device) -> None:
    """Trim the heap, and give unused memory of the device's cache back.

    A search allocates and frees many times a model's size.
    """
    trim_heap()
    if device.type == "cuda":
        torch.cuda.empty_cache()
