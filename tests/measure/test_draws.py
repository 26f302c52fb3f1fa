"""Draws to verify on: what each one holds, what they leave alone, and calls in a row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ampopt.ir.numerics import fresh_draw
from ampopt.measure.draws import (
    LARGE,
    VERY_LARGE,
    Draw,
    fault_draws,
    faults_elsewhere,
    integer_draws,
    plain_draws,
    range_draws,
    steps_of,
)

SIGNED = torch.tensor([1.0, -4.0, 2.0])
IDS = torch.tensor([3, 1, 2])


def first_inputs(draws: list[Draw]) -> dict[str, list[float]]:
    """The first input of the first call of every draw, by the draw's name."""
    return {draw.name: draw.calls[0][0].tolist() for draw in draws}


def same(draws: list[Draw], others: list[Draw]) -> list[bool]:
    """Of every call of each draw whether all its inputs are the same as in the other draws."""
    calls = [call for draw in draws for call in draw.calls]
    other_calls = [call for draw in others for call in draw.calls]
    return [all(map(torch.equal, *pair)) for pair in zip(calls, other_calls, strict=True)]


@pytest.mark.parametrize("in_a_row", [1, 3])
def test_the_example_itself_comes_first_and_every_draw_has_as_many_calls(in_a_row: int) -> None:
    draws = plain_draws((SIGNED, IDS), 2, 0, in_a_row=in_a_row)
    assert [draw.name for draw in draws] == ["the example", "random inputs 1", "random inputs 2"]
    assert [len(draw.calls) for draw in draws] == [in_a_row] * 3
    assert draws[0].calls[0] == (SIGNED, IDS)
    for call in draws[0].calls[1:] + draws[1].calls + draws[2].calls:
        assert not torch.equal(call[0], SIGNED)
        assert sorted(call[1].tolist()) == [1, 2, 3]


def test_random_draws_follow_from_the_seed_and_no_two_are_the_same() -> None:
    examples = (torch.randn(4, 5),)
    draws = plain_draws(examples, 2, 7, in_a_row=2)
    assert all(same(draws, plain_draws(examples, 2, 7, in_a_row=2)))
    assert same(draws, plain_draws(examples, 2, 8, in_a_row=2)) == [True] + [False] * 5
    values = {tuple(call[0].flatten().tolist()) for draw in draws for call in draw.calls}
    assert len(values) == 6


def test_a_model_without_inputs_is_called_and_nothing_is_drawn_for_it() -> None:
    assert plain_draws((), 5, 0, in_a_row=2) == [Draw("the example", ((), ()))]
    assert range_draws((), in_a_row=2) == []
    assert fault_draws((), in_a_row=2) == []


def test_ranges_are_the_scaled_the_constant_and_the_one_hot_example() -> None:
    found = first_inputs(range_draws((SIGNED,), in_a_row=1))
    assert found.pop("inputs x0.01") == pytest.approx([0.01, -0.04, 0.02])
    assert found == {
        "inputs of 0": [0, 0, 0],
        "inputs x10": [10, -40, 20],
        "inputs x100": [100, -400, 200],
        "constant inputs": [4, 4, 4],
        "constant negative inputs": [-4, -4, -4],
        "one hot element": [0, 4, 0],
    }


def test_ranges_of_a_spoilt_example_are_finite() -> None:
    spoilt = torch.tensor([2.0, -math.inf, math.nan])
    found = first_inputs(range_draws((spoilt,), in_a_row=1))
    assert found["inputs x10"] == [20, 0, 0]
    assert all(math.isfinite(number) for numbers in found.values() for number in numbers)


@pytest.mark.parametrize(
    ("example", "largest"),
    [([2.0, -math.inf, math.nan], 2.0), ([0.0, 0.0, 0.0], 1.0), ([math.nan, math.inf, math.nan], 1.0)],
)
def test_a_constant_is_finite_and_not_0_whatever_the_example_holds(
    example: list[float], largest: float
) -> None:
    found = first_inputs(range_draws((torch.tensor(example),), in_a_row=1))
    assert found["constant inputs"] == [largest] * 3
    assert found["one hot element"] == [0, largest, 0]


def test_a_fault_is_in_the_middle_element_of_every_floating_point_input_and_nowhere_else() -> None:
    image, scalar = torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last), torch.tensor(2.0)
    before = image.clone()
    draws = fault_draws((image, IDS, scalar), in_a_row=2)
    assert [draw.name for draw in draws] == ["NaN in one element", "infinity in one element"]
    for draw, is_fault in zip(draws, (torch.isnan, torch.isposinf), strict=True):
        assert len(draw.calls) == 2
        for wrong, ids, wrong_scalar in draw.calls:
            assert is_fault(wrong).nonzero().tolist() == [[1, 1, 2, 2]]
            assert int((wrong == before).sum()) == before.numel() - 1
            assert wrong.stride() == image.stride()
            assert ids is IDS
            assert bool(is_fault(wrong_scalar))
    assert torch.equal(image, before)
    assert float(scalar) == 2.0


@pytest.mark.parametrize("examples", [(IDS,), (torch.ones(0, 3),), (IDS > 1, torch.ones(2, 0))])
def test_inputs_that_cannot_vary_give_no_draws_of_ranges_and_faults(examples: tuple[Tensor, ...]) -> None:
    assert range_draws(examples, in_a_row=1) == []
    assert fault_draws(examples, in_a_row=1) == []


def test_a_fault_is_in_each_of_a_few_channels_of_each_input_alone() -> None:
    image, few, vector = torch.zeros(2, 9, 5, 4), torch.zeros(1, 2, 3), torch.zeros(1, 7)
    draws = faults_elsewhere((image, IDS, few, vector), in_a_row=2)
    places = {
        draw.name: [
            (place, *found)
            for place, tensor in enumerate(draw.calls[1])
            if tensor.is_floating_point()
            for found in tensor.isnan().nonzero().tolist()
        ]
        for draw in draws
        if draw.name.startswith("NaN")
    }
    assert places == {
        "NaN in one element of channel 0 of input 0": [(0, 1, 0, 2, 2)],
        "NaN in one element of channel 4 of input 0": [(0, 1, 4, 2, 2)],
        "NaN in one element of channel 8 of input 0": [(0, 1, 8, 2, 2)],
        "NaN in one element of channel 0 of input 2": [(2, 0, 0, 1)],
        "NaN in one element of channel 1 of input 2": [(2, 0, 1, 1)],
        "NaN in one element of input 3": [(3, 0, 3)],
    }
    assert not image.isnan().any()
    alone = faults_elsewhere((vector, IDS), in_a_row=1)
    assert not any(draw.name.startswith("NaN") for draw in alone)  # `fault_draws` has that one


def test_negative_infinity_is_in_one_element_and_in_all_of_every_input() -> None:
    examples = (SIGNED, IDS, torch.ones(1, 2, 3))
    one, every = (draw for draw in faults_elsewhere(examples, in_a_row=1) if "negative" in draw.name)
    assert one.name == "negative infinity in one element"
    assert every.name == "negative infinity in all elements"
    for place in (0, 2):
        assert int((one.calls[0][place] == -torch.inf).sum()) == 1
        assert bool((every.calls[0][place] == -torch.inf).all())
        assert bool(examples[place].isfinite().all())
    assert one.calls[0][1] is IDS
    assert every.calls[0][1] is IDS
    assert faults_elsewhere((IDS,), in_a_row=1) == []


def test_an_integer_is_one_that_the_examples_do_not_have() -> None:
    image, small = torch.zeros(2), torch.tensor([3, 250, 7], dtype=torch.uint8)
    found = {
        draw.name: [tensor.tolist() for tensor in draw.calls[1]]
        for draw in integer_draws((image, IDS, IDS > 1), in_a_row=2)
    }
    middle, largest = len(IDS) // 2, int(IDS.max())

    def with_middle(value: int) -> list[int]:
        return [value if place == middle else number for place, number in enumerate(IDS.tolist())]

    rest = [0.0, 0.0], (IDS > 1).tolist()
    assert found == {
        "an integer above all others": [rest[0], with_middle(largest + 1), rest[1]],
        "-1": [rest[0], with_middle(-1), rest[1]],
        "a large integer": [rest[0], with_middle(LARGE), rest[1]],
        "a very large integer": [rest[0], with_middle(VERY_LARGE), rest[1]],
        "the largest integers alone": [rest[0], [2**63 - 1] * len(IDS), rest[1]],
        "the smallest integers alone": [rest[0], [-(2**63)] * len(IDS), rest[1]],
    }
    assert [draw.calls[0][0].tolist() for draw in integer_draws((small,), in_a_row=1)] == [
        *([3, 251, 7], [3, 255, 7], [255] * 3, [0] * 3)
    ]
    full = torch.tensor([3, 255, 7], dtype=torch.uint8)
    for kept, every in ((True, [[3, 255, 7], [255] * 3, [0] * 3]), (False, [[3, 255, 7], [255] * 3])):
        draws = integer_draws((full,), in_a_row=1, with_smallest=kept)
        assert [draw.calls[0][0].tolist() for draw in draws] == every
    assert integer_draws((image, IDS > 1, IDS[:0]), in_a_row=1) == []


def test_each_of_several_inputs_of_integers_is_changed_alone_too() -> None:
    one, other = torch.tensor([3, 5]), torch.tensor([2], dtype=torch.int32)
    draws = {
        draw.name: [t.tolist() for t in draw.calls[0]] for draw in integer_draws((one, other), in_a_row=1)
    }
    assert draws["-1"] == [[3, -1], [-1]]
    assert draws["-1 for input 0"] == [[3, -1], [2]]
    assert draws["-1 for input 1"] == [[3, 5], [-1]]
    assert "a very large integer for input 0" in draws
    assert "a very large integer for input 1" not in draws  # the same as a large one in int32
    many = integer_draws((one,) * 9, in_a_row=1)
    assert {int(draw.name[-1]) for draw in many if " for input " in draw.name} == {0, 1, 2, 3}


def test_what_a_call_leaves_of_the_state_is_given_to_the_next() -> None:
    def run(x: Tensor, total: Tensor, count: Tensor) -> list[Tensor]:
        return [x * total, total + x, count + 1]

    draw = Draw("", tuple((torch.tensor(x),) for x in (2.0, 3.0, 4.0)))
    found = steps_of(draw, run, (torch.tensor(1.0), torch.tensor(0)))
    assert [[float(output) for output in outputs] for outputs in found] == [[2, 3, 1], [9, 6, 2], [24, 10, 3]]


def test_without_a_state_every_call_gets_its_own_inputs_alone() -> None:
    draw = Draw("", ((torch.tensor(2.0), torch.tensor(5.0)), (torch.tensor(3.0), torch.tensor(7.0))))
    found = steps_of(draw, lambda x, y: (x * y,), ())
    assert [[float(output) for output in outputs] for outputs in found] == [[10], [21]]


@pytest.mark.parametrize("largest", [1e-30, 0.1, 1.0, 4.37, 255.0, 3e38])
def test_sums_of_constant_inputs_and_of_their_squares_are_exact(largest: float) -> None:
    x = torch.full((1, 6144), largest)
    constant = {draw.name: draw.calls[0][0] for draw in range_draws((x,), in_a_row=1)}["constant inputs"]
    value = float(constant[0, 0])
    assert 0.94 * largest < value <= float(x[0, 0])
    assert bool((constant == value).all())
    mantissa = math.frexp(value)[0]
    assert not _is_exact_in_turn(4.37)  # of numbers in general
    assert _is_exact_in_turn(mantissa)
    assert _is_exact_in_turn(mantissa**2)


def _is_exact_in_turn(term: float) -> bool:
    """Whether 6,144 times a number is what adding it up in float32 gives."""
    terms = np.full(6144, term, np.float32)
    return bool(terms.cumsum()[-1] == 6144 * float(terms[0]))


def test_complex_inputs_vary_as_real_ones_do() -> None:
    example = torch.randn(3, dtype=torch.complex64)
    ranges = {draw.name: draw.calls[0][0] for draw in range_draws((example,), in_a_row=1)}
    assert torch.equal(ranges["inputs x10"], example * 10)
    largest = float(example.abs().max())
    assert ranges["constant inputs"].imag.eq(0).all()
    assert ranges["constant inputs"].real.gt(0.94 * largest).all()
    assert ranges["constant inputs"].real.le(largest).all()
    faults = {draw.name: draw.calls[0][0] for draw in fault_draws((example,), in_a_row=1)}
    assert [bool(found.isnan()[1]) for found in faults.values()] == [True, False]
    assert [bool(found.isinf()[1]) for found in faults.values()] == [False, True]


def test_regions_stay_in_the_images_that_there_are() -> None:
    """`roi_align` reads unchecked where the first column says."""
    regions = torch.tensor([[0.0, 1.5, 2.0, 8.0, 9.0], [1.0, 0.0, 0.0, 4.0, 4.0]])
    image = torch.randn(2, 3, 16, 16)
    draws = [
        *plain_draws((image, regions), 3, 0, in_a_row=1),
        *range_draws((image, regions), in_a_row=1),
        *fault_draws((image, regions), in_a_row=1),
    ]
    assert len(draws) > 8
    for draw in draws:
        for _, drawn in draw.calls:
            assert torch.equal(drawn[:, 0], regions[:, 0])
    all_drawn = [call[1] for draw in draws for call in draw.calls]
    assert sum(not torch.equal(each, regions) for each in all_drawn) > 5


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([[0.5, 1, 2, 3, 4]]),
        torch.tensor([[-1.0, 1, 2, 3, 4]]),
        torch.zeros(2, 4),
        torch.zeros(1, 2, 5),
    ],
)
def test_what_cannot_be_regions_varies_in_its_first_column(other: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(fresh_draw(other, generator)[:, 0], other[:, 0])
