"""How tensors lie in memory, as the kernels read them: what they take as it is, and what is copied first."""

from __future__ import annotations

import pytest
import torch

from ampopt.kernels.pixel_layout import in_order, packed_depthwise, pixel_stride, pixels, reads_runs, unit_of


@pytest.mark.parametrize(
    ("shape", "strides", "is_image", "expected"),
    [
        pytest.param((2, 3, 4, 5), (60, 1, 15, 3), True, 3, id="channels innermost"),
        pytest.param((2, 3, 4, 5), (60, 20, 5, 1), True, None, id="channels outermost"),
        pytest.param((2, 3, 4, 5), (160, 1, 40, 8), True, 8, id="slice of channels"),
        pytest.param((2, 3, 4, 4), (60, 1, 15, 3), True, None, id="slice of columns"),
        pytest.param((2, 3, 4, 5), (0, 1, 15, 3), True, None, id="repeated image"),
        pytest.param((2, 3, 1, 1), (3, 1, 1, 1), True, 3, id="one pixel"),
        pytest.param((2, 3, 1, 1), (0, 1, 1, 1), True, None, id="repeated pixel"),
        pytest.param((1, 3, 1, 1), (7, 1, 7, 7), True, 3, id="one pixel in all"),
        pytest.param((2, 1, 4, 5), (20, 20, 5, 1), True, 1, id="one channel"),
        pytest.param((2, 1, 4, 5), (60, 20, 15, 3), True, 3, id="one channel of several"),
        pytest.param((2, 5, 8), (40, 8, 1), False, 8, id="rows"),
        pytest.param((2, 5, 8), (8, 16, 1), False, None, id="rows in another order"),
        pytest.param((2, 5, 8), (1, 2, 10), False, None, id="transposed rows"),
    ],
)
def test_the_stride_of_pixels(
    shape: tuple[int, ...], strides: tuple[int, ...], is_image: bool, expected: int | None
) -> None:
    assert pixel_stride(shape, strides, is_image=is_image) == expected


def test_what_cannot_be_read_is_copied() -> None:
    x = torch.randn(2, 3, 4, 5)
    copy, pixel = pixels(x, is_image=True)
    assert pixel == 3
    assert torch.equal(copy, x)
    assert copy.is_contiguous(memory_format=torch.channels_last)
    assert pixels(copy, is_image=True)[0] is copy


def test_depthwise_weights_are_packed_once() -> None:
    weight = torch.randn(6, 1, 3, 2)
    packed = packed_depthwise(weight)
    assert torch.equal(packed, weight)
    assert packed.permute(2, 3, 1, 0).is_contiguous()
    assert packed_depthwise(packed) is packed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"channels": 8}, True),
        ({"channels": 16}, False),
        ({"taps": (3, 1)}, False),
        ({"groups": 3}, False),
        ({"pixel": 4}, False),
        ({"geometry": (1, 1, 0, 0, 1, 2)}, False),
    ],
)
def test_runs_are_read_where_nothing_lies_between(change: dict[str, object], expected: bool) -> None:
    plain = {"channels": 3, "taps": (3, 3), "groups": 1, "pixel": 3, "geometry": (2, 2, 1, 1, 2, 1)}
    if "channels" in change:
        change = {**change, "pixel": change["channels"]}
    assert reads_runs(**{**plain, **change}) is expected  # type: ignore[arg-type]


def test_units_divide_all_counts() -> None:
    assert [unit_of(64, 32), unit_of(24, 20), unit_of(3, 64), unit_of(16), unit_of(6, 2)] == [8, 4, 1, 8, 2]


def test_a_slice_of_channels_is_read_in_its_place() -> None:
    whole = torch.randn(2, 8, 3, 4).contiguous(memory_format=torch.channels_last)
    part = whole[:, 2:5]
    read, pixel = pixels(part, is_image=True)
    assert read is part
    assert pixel == 8
    rows = torch.randn(5, 8)[:, 2:5]
    read, pixel = pixels(rows, is_image=False)
    assert read is rows
    assert pixel == 8


def test_the_stride_leads_to_every_pixel_in_turn() -> None:
    x = torch.randn(2, 8, 3, 4).contiguous(memory_format=torch.channels_last)[:, 1:6]
    pixel = pixel_stride(x.shape, x.stride(), is_image=True)
    assert pixel is not None
    rows = torch.as_strided(x, (2 * 3 * 4, 5), (pixel, 1))
    assert torch.equal(rows, x.permute(0, 2, 3, 1).reshape(-1, 5))


@pytest.mark.parametrize("is_image", [True, False])
def test_what_is_in_order_stays_where_it_is(is_image: bool) -> None:
    x = torch.randn(2, 3, 4, 5)
    ordered = in_order(x, is_image=is_image)
    assert torch.equal(ordered, x)
    assert ordered.stride() == ((60, 1, 15, 3) if is_image else (60, 20, 5, 1))
    assert in_order(ordered, is_image=is_image) is ordered
