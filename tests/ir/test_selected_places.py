"""What a tensor's value selects, the tensor selects: the same places, and an error where there is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.ir.graph import aten, calls
from ampopt.ir.lowering import lower
from ampopt.ir.program import Program
from tests.support.later_pytorch import needs_places_of_values
from tests.support.planted import captured_of
from tests.support.selecting import OTHERS, PLACES, SELECTING, Selecting, T, X, answer, number_of, place

pytestmark = needs_places_of_values


def _program(function: Callable[..., Any], dtype: torch.dtype = torch.int64) -> Program:
    return captured_of(Selecting(function), T, place(2, dtype), X)[1].program


def _reads_numbers(program: Program) -> bool:
    return any(calls(program.graph, [aten.item.default, aten._local_scalar_dense.default]))


def _check(function: Callable[..., Any], program: Program, places: list[int], dtype: torch.dtype) -> None:
    """Assert that a program gives what the model does at each place, and raises where that does."""
    answered = set()
    for number in places:
        if not torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max:
            continue
        given = T, place(number, dtype), X
        expected, got = answer(Selecting(function), *given), answer(program.run, *given)
        answered.add(expected is not None)
        assert (got is None) == (expected is None), number
        for mine, its in zip(got or [], expected or [], strict=True):
            assert torch.equal(mine, its), number
            assert mine.dtype is its.dtype
    assert True in answered


DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
BYTES = (
    "computed",
    "limited",
    "checked",
    "a_slice",
    "a_slice_of_columns",
    "a_slice_from_the_end",
    "written_around",
)
"""Those of numbers alone: PyTorch reads bytes in brackets as a mask."""


@pytest.mark.parametrize(
    ("name", "dtype"), [*itertools.product(SELECTING, DTYPES), *((name, torch.uint8) for name in BYTES)]
)
def test_a_place_is_the_same_as_a_tensor(name: str, dtype: torch.dtype) -> None:
    program = _program(SELECTING[name], dtype)
    assert not _reads_numbers(program)
    _check(SELECTING[name], program, PLACES, dtype)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_more_than_a_place_stays_a_number(name: str) -> None:
    program = _program(OTHERS[name])
    assert _reads_numbers(program)
    _check(OTHERS[name], program, PLACES[:29], torch.int64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("written", [aten.index_put.default]),
        ("added", [aten.index.Tensor, aten.add.Tensor, aten.index_put.default]),
        (
            "around",
            [aten.remainder.Scalar, aten.reshape.default, aten.unsqueeze.default, aten.index_copy.default],
        ),
    ],
)
def test_a_write_costs_one_write_and_the_reads_of_the_model(name: str, expected: list[object]) -> None:
    def added(t: Tensor, k: Tensor, x: Tensor) -> None:
        t[k] += x

    def around(t: Tensor, k: Tensor, x: Tensor) -> None:
        t[number_of(k) % 6] = x

    functions = {"written": SELECTING["written"], "added": added, "around": around}
    program = _program(functions[name])
    found = [node.target for node in calls(program.graph) if node.target is not aten.mul.Tensor]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    _check(functions[name], program, PLACES, torch.int64)


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 4), (8, 4), (6,)])
def test_a_place_in_a_constant_of_the_model_is_a_tensor(shape: tuple[int, ...]) -> None:
    table = torch.randn(shape)

    def function(t: Tensor, k: Tensor, x: Tensor) -> Any:
        return table[k % 2] * 2, table[..., k - 1] + 1

    program = _program(function)
    assert not _reads_numbers(program)
    _check(function, program, PLACES, torch.int64)


def test_much_that_is_computed_of_one_number_is_written_too() -> None:
    def function(t: Tensor, k: Tensor, x: Tensor) -> None:
        number = number_of(k)
        for count in range(12):
            number = (number * 3 + count) % 7
            t[number % 6] += x
            t[(k + count) % 6, count % 8] = count

    program = _program(function)
    assert not _reads_numbers(program)
    _check(function, program, PLACES, torch.int64)


def test_a_place_in_a_tensor_whose_size_varies_is_a_tensor() -> None:
    function, given = SELECTING["of_a_view"], (T, place(2), X)
    columns = torch.export.Dim("columns", min=3)
    sizes = {"t": {0: torch.export.Dim("rows", min=3), 1: columns}, "k": None, "x": {0: columns}}
    with torch.no_grad():
        graph = lower(torch.export.export(Selecting(function), given, dynamic_shapes=sizes, strict=False))
    assert not any(calls(graph, [aten.item.default]))
    for rows, width, number in ((4, 5, 3), (4, 5, -4), (9, 6, 5), (9, 6, 6), (3, 4, 2), (3, 4, 3)):
        other = torch.randn(rows, width), place(number), torch.randn(width)
        expected, got = answer(Selecting(function), *other), answer(graph, *other)
        assert (got is None) == (expected is None) == (number >= min(rows, width))
        assert all(map(torch.equal, got or [], expected or []))
