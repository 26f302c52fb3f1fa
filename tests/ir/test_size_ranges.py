"""Ranges of sizes: what a user may ask for, and which calls are in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.errors import InputError
from ampopt.ir.signature import flatten_call
from ampopt.ir.size_range import corners, shown
from ampopt.ir.size_ranges import checked, drawn_within, hold, now, resized, sizes_of

IMAGE, FLAT = torch.zeros(2, 3, 8, 6), torch.zeros(2, 5)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("batch", "give the range of each size"),
        ({}, "give the range of each size"),
        ({"bath": (1, 8)}, "there is no size 'bath': choose from batch, height, width"),
        ({"batch": (8, 1)}, "from 8 to 1 is no range"),
        ({"batch": (0, 8)}, "from 0 to 8 is no range"),
        ({"batch": (1, 8.0)}, "two whole numbers"),
        ({"batch": (True, 8)}, "two whole numbers"),
        ({"batch": 8}, "two whole numbers"),
        ({"batch": (1, 2, 3)}, "two whole numbers"),
        ({"x": {}}, "no dimension of input 'x'"),
        ({"x": {2: (8, 4)}}, "from 8 to 4 is no range"),
    ],
)
def test_what_is_no_range_is_refused(asked: Any, reason: str) -> None:
    with pytest.raises(InputError, match=r"^dynamic") as error:
        checked(asked)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"batch": (3, 8)}, "is 2 in the example, which is outside of batch 3 to 8"),
        ({"batch": (1, 1)}, "outside of batch 1 to 1"),
        ({"y": {0: (1, 8)}}, "there is no input 'y'; the inputs are x, flat"),
        ({"x": {4: (1, 8)}}, "has no dimension 4"),
        ({"x": {-1: (1, 8)}}, "has no dimension -1"),
        ({"batch": (1, 8), "x": {0: (1, 4)}}, "has two ranges"),
        ({"x": {0: (1, 8), 1: (1, 8), 2: (1, 8), 3: (1, 8)}, "flat": {0: (1, 8)}}, "5 sizes vary"),
    ],
)
def test_ranges_that_do_not_fit_the_example_are_refused(asked: Any, reason: str) -> None:
    with pytest.raises(InputError, match=r"^dynamic") as error:
        sizes_of(asked, ("x", "flat"), (IMAGE, FLAT))
    assert reason in str(error.value)


def test_inputs_of_different_batches_need_ranges_of_their_own() -> None:
    examples = IMAGE, torch.zeros(7, 5)
    with pytest.raises(InputError, match="the batch of input 'x' is 2, and that of 'boxes' is 7"):
        sizes_of({"batch": (1, 8)}, ("x", "boxes"), examples)
    sizes = sizes_of({"boxes": {0: (1, 100)}}, ("x", "boxes"), examples)
    assert shown(sizes) == "boxes_0 1 to 100"


def test_no_input_may_lack_what_is_named() -> None:
    with pytest.raises(InputError, match="no input has a height"):
        sizes_of({"height": (1, 8)}, ("flat",), (FLAT,))


def test_corners_and_draws_are_within_the_ranges() -> None:
    sizes = sizes_of({"batch": (1, 4), "height": (4, 9)}, ("x", "flat"), (IMAGE, FLAT))
    assert now(sizes, (IMAGE, FLAT)) == {"batch": 2, "height": 8}
    assert [tuple(each.values()) for each in corners(sizes)] == [(1, 4), (1, 9), (4, 4), (4, 9)]
    assert drawn_within(sizes) == drawn_within(sizes)
    assert all(1 <= each["batch"] <= 4 and 4 <= each["height"] <= 9 for each in drawn_within(sizes))


def test_tensors_are_repeated_or_cut_off_along_what_varies() -> None:
    sizes = sizes_of({"batch": (1, 5)}, ("x",), (torch.arange(6).reshape(2, 3),))
    (larger,) = resized((torch.arange(6).reshape(2, 3),), sizes, {"batch": 5})
    assert larger.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2]]
    (smaller,) = resized((torch.arange(6).reshape(2, 3),), sizes, {"batch": 1})
    assert smaller.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("call", "is_held"),
    [
        ((torch.zeros(4, 3, 8, 6), torch.zeros(4, 5), 0.0), True),
        ((torch.zeros(4, 3, 8, 6), torch.zeros(3, 5), 0.0), False),
        ((torch.zeros(9, 3, 8, 6), torch.zeros(9, 5), 0.0), False),
        ((torch.zeros(4, 3, 9, 6), torch.zeros(4, 5), 0.0), False),
        ((torch.zeros(4, 3, 8), torch.zeros(4, 5), 0.0), False),
        ((torch.zeros(4, 3, 8, 6), torch.zeros(4, 5), -0.0), False),
        ((torch.zeros(4, 3, 8, 6), torch.zeros(4, 5).double(), 0.0), False),
        ((torch.zeros(4, 3, 8, 6), torch.zeros(4, 5), torch.zeros(())), False),
        ((torch.zeros(4, 3, 8, 6), torch.zeros(4, 5)), False),
    ],
)
def test_a_call_is_in_the_ranges_where_only_sizes_in_them_differ(call: Any, is_held: bool) -> None:
    sizes = sizes_of({"batch": (1, 8)}, ("x", "flat"), (IMAGE, FLAT))
    own, own_spec = flatten_call((IMAGE, FLAT, 0.0), {})
    leaves, spec = flatten_call(call, {})
    assert hold(sizes, own, own_spec, leaves, spec) is is_held


def test_a_tensor_of_a_class_of_its_own_is_not_in_the_ranges() -> None:
    class Own(Tensor):
        pass

    sizes = sizes_of({"batch": (1, 8)}, ("flat",), (FLAT,))
    own, spec = flatten_call((FLAT,), {})
    leaves, _ = flatten_call((torch.zeros(3, 5).as_subclass(Own),), {})
    assert not hold(sizes, own, spec, leaves, spec)
