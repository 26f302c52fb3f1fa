"""Page-locked copies: whose memory they are in, when it is used again, and what a refusal leaves."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

from ampopt.system.pinned import MOST_BLOCKS, HostCopies, cuda_runtime

SHAPE, DTYPE = (2, 3), np.dtype(np.float32)


class FakeRuntime:
    """The CUDA runtime with plain memory in the place of page-locked memory."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.refuses_memory, self.refuses_copies = False, False
        self.last_error = 0

    def cudaHostAlloc(self, address: Any, size: int, flags: int) -> int:  # noqa: N802
        if self.refuses_memory:
            self.last_error = 2
            return 2
        block = ctypes.create_string_buffer(size)
        address._obj.value = ctypes.addressof(block)
        self.blocks[ctypes.addressof(block)] = block
        return 0

    def cudaFreeHost(self, address: int) -> int:  # noqa: N802
        del self.blocks[address]
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        found, self.last_error = self.last_error, 0
        return found

    def cudaMemcpy(self, to: int, source: int, size: int, kind: int) -> int:  # noqa: N802
        assert kind == 2
        if self.refuses_copies:
            self.last_error = 700
            return 700
        ctypes.memmove(to, source, size)
        return 0


def source(value: float) -> np.ndarray[Any, np.dtype[Any]]:
    return np.full(SHAPE, value, DTYPE)


def test_every_copy_has_its_values_as_long_as_it_lives() -> None:
    runtime, sources = FakeRuntime(), [source(i) for i in range(MOST_BLOCKS + 3)]
    copies = HostCopies(runtime, SHAPE, DTYPE)
    found = [copies.copy(values.ctypes.data) for values in sources]
    assert all(np.array_equal(a, b) for a, b in zip(found, sources, strict=True))
    assert len(runtime.blocks) == MOST_BLOCKS
    assert found[-1].ctypes.data not in runtime.blocks


def test_a_block_is_used_again_only_after_its_last_view_is_gone() -> None:
    runtime, values = FakeRuntime(), source(1.0)
    copies = HostCopies(runtime, SHAPE, DTYPE)
    first = copies.copy(values.ctypes.data)
    address, view = first.ctypes.data, first[1:, ::2].T
    del first
    gc.collect()
    assert copies.copy(values.ctypes.data).ctypes.data != address
    assert (view == 1.0).all()
    del view
    gc.collect()
    held = [copies.copy(values.ctypes.data) for _ in range(2)]
    assert address in {array.ctypes.data for array in held}


def test_free_blocks_are_given_back_with_the_pool_and_shown_ones_stay() -> None:
    runtime, values = FakeRuntime(), source(3.0)
    copies = HostCopies(runtime, SHAPE, DTYPE)
    kept, gone = copies.copy(values.ctypes.data), copies.copy(values.ctypes.data)
    del gone
    gc.collect()
    del copies
    gc.collect()
    assert list(runtime.blocks) == [kept.ctypes.data]
    assert (kept == 3.0).all()


def test_without_page_locked_memory_copies_are_in_plain_memory() -> None:
    runtime, values = FakeRuntime(), source(2.0)
    runtime.refuses_memory = True
    assert (HostCopies(runtime, SHAPE, DTYPE).copy(values.ctypes.data) == 2.0).all()
    assert not runtime.blocks
    assert runtime.last_error == 0


def test_a_copy_that_fails_is_an_error_and_loses_no_block() -> None:
    runtime, values = FakeRuntime(), source(2.0)
    copies = HostCopies(runtime, SHAPE, DTYPE)
    runtime.refuses_copies = True
    for _ in range(MOST_BLOCKS + 1):
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            copies.copy(values.ctypes.data)
    assert runtime.last_error == 0
    gc.collect()
    runtime.refuses_copies = False
    assert copies.copy(values.ctypes.data).ctypes.data in runtime.blocks


@pytest.mark.gpu
def test_the_gpus_own_runtime_copies_what_a_tensor_holds() -> None:
    import torch

    tensor = torch.arange(6.0, device="cuda").reshape(SHAPE)
    torch.cuda.synchronize()
    runtime = cuda_runtime()
    assert runtime is not None
    copies = HostCopies(runtime, SHAPE, DTYPE)
    found = [copies.copy(tensor.data_ptr()) for _ in range(MOST_BLOCKS + 2)]
    assert all(np.array_equal(array, tensor.cpu().numpy()) for array in found)
