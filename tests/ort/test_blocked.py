"""Fewer reorderings in ONNX Runtime's CPU graphs: they go, the numbers stay, whatever the graph."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampopt.ort.profile import optimized
from ampopt.ort.session import OnnxRunner, SessionOptions, relative_error

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from ampopt.ort.blocked import DOMAIN, block_size, keep_blocked
from tests.support.image_graphs import Graph, operators

OPTIONS = SessionOptions(threads=1)
REORDERINGS = ("ReorderInput", "ReorderOutput")


def reorderings(model: bytes) -> int:
    return sum(operators(model)[name] for name in REORDERINGS)


def check(model: bytes, blocked: bytes) -> None:
    """The same numbers, but for their order in sums."""
    old = OnnxRunner(model, OPTIONS)
    new = OnnxRunner(blocked, dataclasses.replace(OPTIONS, optimization="none"))
    rng = np.random.default_rng(1)
    for _ in range(2):
        x = rng.standard_normal(old.inputs[0].fixed_shape).astype(np.float32)
        for found, wanted in zip(new(x), old(x), strict=True):
            assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("by_rows", [False, True])
def test_squeeze_and_excite_stays_in_blocks(by_rows: bool) -> None:
    block = block_size()
    graph = Graph()
    x = graph.add("Relu", graph.conv("x", block, 2 * block, 3))
    x = graph.squeeze(x, 2 * block, block, by_rows=by_rows)
    model = graph.model(block, [graph.conv(x, 2 * block, block)])
    blocked = keep_blocked(model, OPTIONS)
    assert blocked is not None
    assert reorderings(optimized(model, OPTIONS)) > reorderings(blocked)
    assert reorderings(blocked) == 2  # the input and the output
    assert operators(blocked)["Mul"] == operators(blocked)["ReduceMean"] == 0
    check(model, blocked)


def test_sums_and_activations_are_fused_behind_a_plain_operator() -> None:
    block = block_size()
    graph = Graph()
    x = graph.plain(graph.conv("x", block, block, 3))
    for _ in range(3):
        x = graph.add("Relu", graph.add("Add", graph.conv(x, block, block, 3), x))
    model = graph.model(block, [graph.plain(x)])
    blocked = keep_blocked(model, OPTIONS)
    assert blocked is not None
    assert operators(optimized(model, OPTIONS))["Add"] == 3
    assert operators(blocked)["Add"] == operators(blocked)["Relu"] == 0
    assert reorderings(blocked) < reorderings(optimized(model, OPTIONS))
    check(model, blocked)


@pytest.mark.parametrize("batch", [1, 2])
def test_channels_behind_channels_stay_in_blocks_and_only_the_plain_part_is_reordered(batch: int) -> None:
    block = block_size()
    graph = Graph(batch)
    x = graph.conv("x", block, 2 * block, 3)
    y = graph.plain(graph.conv(x, 2 * block, block))
    both = graph.add("Concat", x, y, x, axis=1)
    model = graph.model(block, [graph.conv(both, 5 * block, block)])
    blocked = keep_blocked(model, OPTIONS)
    assert blocked is not None
    assert reorderings(optimized(model, OPTIONS)) == 5
    assert reorderings(blocked) == 4  # the input, the output, before and behind the plain operator
    check(model, blocked)


@pytest.mark.parametrize(("axis", "channels"), [(2, 1.0), (1, 0.5)])
def test_other_ways_to_put_tensors_together_stay(axis: int, channels: float) -> None:
    block = block_size()
    narrow = int(channels * block)
    graph = Graph()
    x = graph.conv("x", block, narrow, 3)
    both = graph.add("Concat", x, graph.plain(x), axis=axis)
    inside = 2 * narrow if axis == 1 else narrow
    assert keep_blocked(graph.model(block, [graph.conv(both, inside, block)]), OPTIONS) is None


def test_what_has_nothing_to_save_is_left_alone() -> None:
    block = block_size()
    graph = Graph()
    model = graph.model(block, [graph.add("Relu", graph.conv("x", block, block, 3))])
    assert keep_blocked(model, OPTIONS) is None
    only = Graph()
    assert keep_blocked(only.model(block, [only.add("Relu", "x")]), OPTIONS) is None


@pytest.mark.parametrize(("batch", "channels"), [(2, 1.0), (1, 1.5)])
def test_batches_and_channels_that_fill_no_block_are_right(batch: int, channels: float) -> None:
    width = int(channels * block_size())
    graph = Graph(batch)
    x = graph.squeeze(graph.conv("x", width, width, 3), width)
    x = graph.add("Relu", graph.add("Add", graph.conv(x, width, width), x))
    model = graph.model(width, [x])
    if (blocked := keep_blocked(model, OPTIONS)) is not None:
        check(model, blocked)


def test_blocks_are_those_of_this_machine() -> None:
    assert block_size() in (8, 16)
    assert DOMAIN == "com.microsoft.nchwc"


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_graphs_compute_the_same(seed: int) -> None:
    chance = random.Random(seed)
    width = block_size() * chance.choice([1, 2]) + chance.choice([0, 0, 0, 4])
    graph = Graph(chance.choice([1, 1, 2]), (chance.choice([1, 4, 5]), chance.choice([1, 6])), seed)
    there = ["x", graph.conv("x", width, width, 3)]
    for _ in range(chance.randint(2, 12)):
        x, y = chance.choice(there[-4:]), chance.choice(there)
        kind = chance.randrange(10)
        if kind <= 1:
            made = graph.conv(x, width, width, chance.choice([1, 3]), chance.choice([1, width]))
        elif kind == 2:
            made = graph.add(chance.choice(["Relu", "Sigmoid", "Tanh", "HardSwish", "Neg", "Abs"]), x)
        elif kind == 3:
            made = graph.add(chance.choice(["Add", "Sub", "Mul", "Max"]), x, y)
        elif kind == 4:
            made = graph.squeeze(x, width, chance.choice([4, 8, 16]))
        elif kind == 5:
            made = graph.plain(x)
        elif kind == 6:
            made = graph.add("Clip", x, graph.constant(np.float32(-1)), graph.constant(np.float32(1)))
        elif kind == 7:
            made = graph.add("Add", x, graph.constant(np.float32(0.5)))
        elif kind == 8:
            made = graph.add("Mul", x, graph.mean(y))
        else:
            made = graph.conv(graph.add("Concat", x, y, axis=1), 2 * width, width)
        there.append(made)
    outputs = list(dict.fromkeys([there[-1], *chance.sample(there[1:], chance.randint(0, 2))]))
    model = graph.model(width, outputs)
    if (blocked := keep_blocked(model, OPTIONS)) is not None:
        assert reorderings(blocked) < reorderings(optimized(model, OPTIONS))
        check(model, blocked)
