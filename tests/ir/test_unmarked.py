"""A tensor's memory as bytes or as an array, after which the tensor can still be resized."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.unmarked import array_of, bytes_of

DTYPES = [torch.float32, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3), (4, 1, 1)])
def test_an_array_has_the_tensors_memory(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.arange(20)[: torch.Size(shape).numel()].view(shape).to(dtype)
    array = array_of(tensor)
    assert array.dtype == tensor.clone().numpy().dtype
    assert array.shape == shape
    assert array.tolist() == tensor.tolist()
    assert bytes_of(tensor) == array.tobytes()
    array[...] = 1
    assert (tensor == 1).all()


@pytest.mark.parametrize("read", [array_of, bytes_of])
@pytest.mark.parametrize("tensor", [torch.ones(3), nn.Parameter(torch.ones(3)), torch.ones(6)[2:]])
def test_what_was_read_can_be_resized_after(read: object, tensor: Tensor) -> None:
    read(tensor)  # type: ignore[operator]
    gc.collect()
    with torch.no_grad():
        assert tensor.detach().resize_(1000).shape == (1000,)


def test_memory_lives_as_long_as_its_array() -> None:
    array = array_of(torch.full((1000,), 3.0))
    gc.collect()
    torch.full((1000,), 4.0)
    assert (array == 3).all()
