"""The ranges of numbers hold all that Python computes, and their sources are exactly those that give them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import fx

from ampopt.ir.graph import aten
from ampopt.ir.integer_ranges import FAR, KNOWN, Range, both, lies_in, ranges_of, source_range

SPANS = [(low, high) for low in range(-3, 4) for high in range(low, 4)]
ONE_OPERAND = (operator.neg, torch.sym_not)
FORMS: dict[str, Any] = {
    "itself": lambda n: n,
    "a sum": lambda n: n + 3,
    "a sum from the left": lambda n: -2 + n,
    "a difference": lambda n: n - 5,
    "a difference from the left": lambda n: 4 - n,
    "a negative": lambda n: -n,
    "a product": lambda n: n * 3,
    "a product from the left": lambda n: 2 * n,
    "a quotient": lambda n: n // 4,
    "several": lambda n: 7 - (2 * (n + 1)) // 3,
}
UNKNOWN: dict[str, Any] = {
    "a remainder": lambda n: n % 3,
    "of both sides": lambda n: n + n,
    "a product that turns": lambda n: n * -2,
    "a quotient that turns": lambda n: n // -2,
    "of nothing": lambda n: n * 0,
    "a divisor": lambda n: 6 // n,
    "bits": lambda n: n & 3,
}


def _number(compute: Any) -> tuple[fx.Node, fx.Node]:
    """A number of a tensor in a graph, and one that is computed from it."""
    graph = fx.Graph()
    source = graph.call_function(aten.item.default, (graph.placeholder("k"),))
    found = compute(fx.Proxy(source)).node
    assert isinstance(found, fx.Node)
    return source, found


def _spanned(spans: Iterable[Range]) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(low, high + 1) for low, high in spans))


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.__name__)
def test_a_range_holds_all_that_is_computed_and_is_known_of_one_number(target: Any) -> None:
    graph = fx.Graph()
    count = 1 if target in ONE_OPERAND else 2
    operands = [graph.call_function(aten.item.default, (graph.placeholder(f"k{i}"),)) for i in range(count)]
    result = graph.call_function(target, tuple(operands))
    told = 0
    for spans in itertools.product(SPANS, repeat=count):
        found = ranges_of([result], dict(zip(operands, spans, strict=True)))[result]
        told += found is not None
        if found is None:
            continue
        for values in _spanned(spans):
            assert found[0] <= int(target(*values)) <= found[1], (spans, values)
        if all(low == high for low, high in spans):
            assert found[0] == found[1]
    assert told > 0


def test_the_bits_of_numbers_are_not_known() -> None:
    source, number = _number(lambda n: n & 3)
    assert ranges_of([number], {source: (0, 4)})[number] is None
    assert ranges_of([number], {})[number] is None


def test_a_place_in_memory_is_not_below_zero() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.sym_storage_offset.default, (graph.placeholder("x"),))
    assert ranges_of([node], {}) == {node: (0, FAR)}


@pytest.mark.parametrize("name", FORMS)
def test_the_numbers_that_give_a_range_are_found(name: str) -> None:
    source, number = _number(FORMS[name])
    for wanted in SPANS:
        found = source_range(number, source, wanted)
        assert found is not None
        for value in range(-30, 31):
            assert (found[0] <= value <= found[1]) == (wanted[0] <= FORMS[name](value) <= wanted[1])


@pytest.mark.parametrize("name", UNKNOWN)
def test_numbers_that_no_one_range_holds_are_not_told(name: str) -> None:
    source, number = _number(UNKNOWN[name])
    assert source_range(number, source, (-2, 2)) is None


def test_ranges_meet_and_hold_each_other() -> None:
    assert both((0, 5), (3, 9)) == (3, 5)
    assert lies_in((3, 5), (3, 9))
    assert not lies_in((2, 5), (3, 9))
    assert not lies_in(None, (3, 9))
