"""Products of float16 on a CPU: computed in float32, rounded once; everything else is left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.ir.emulated_half import EmulatedHalf

PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "convolution": (F.conv2d, [(1, 8, 9, 9), (6, 8, 3, 3), (6,)]),
    "transposed convolution": (F.conv_transpose2d, [(1, 8, 5, 5), (8, 6, 3, 3)]),
    "matrix product": (torch.mm, [(5, 40), (40, 7)]),
    "batched matrix product": (torch.bmm, [(2, 5, 40), (2, 40, 7)]),
    "linear": (F.linear, [(5, 40), (7, 40), (7,)]),
    "batched sum": (torch.baddbmm, [(2, 5, 7), (2, 5, 40), (2, 40, 7)]),
    "attention": (F.scaled_dot_product_attention, [(1, 2, 6, 8)] * 3),
}


def operands(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_one_in_float32_rounded_once(name: str) -> None:
    product, shapes = PRODUCTS[name]
    given = operands(shapes)
    with EmulatedHalf():
        found = product(*given)
    assert found.dtype is torch.float16
    assert torch.equal(found, product(*[t.float() for t in given]).half())


def test_sums_that_only_float16_would_overflow_do_not() -> None:
    a, b = torch.full((1, 2), 250.0).half(), torch.tensor([[250.0], [-250.0]]).half()
    with EmulatedHalf():
        assert torch.mm(a, b).item() == 0.0
        assert torch.mm(a, b.abs()).isinf().all()  # the result itself does not fit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_as_always(dtype: torch.dtype) -> None:
    a, b = operands([(5, 40), (40, 7)], dtype)
    expected = torch.mm(a, b)
    with EmulatedHalf():
        found = torch.mm(a, b)
    assert found.dtype is dtype
    assert torch.equal(found, expected)


def test_operators_that_are_no_products_keep_to_float16() -> None:
    x = torch.tensor([60000.0, 60000.0]).half()
    with EmulatedHalf():
        total = x + x
    assert total.dtype is torch.float16
    assert total.isinf().all()


def test_float16_on_a_device_without_numbers_is_not_touched() -> None:
    a = torch.empty(2, 3, device="meta", dtype=torch.float16)
    with EmulatedHalf():
        found = torch.mm(a, a.t())
    assert (found.device.type, found.dtype) == ("meta", torch.float16)


def test_it_is_active_within_and_in_this_thread_alone() -> None:
    elsewhere: list[bool] = []
    assert not EmulatedHalf.is_active()
    with EmulatedHalf():
        assert EmulatedHalf.is_active()
        thread = threading.Thread(target=lambda: elsewhere.append(EmulatedHalf.is_active()))
        thread.start()
        thread.join()
    assert elsewhere == [False]
    assert not EmulatedHalf.is_active()
