"""Grouped convolutions are padded to whole blocks together with what is around them: the same function."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from ampopt.ort.options import SessionOptions  # noqa: E402
from ampopt.ort.padding import groups_to_add, with_padded_groups  # noqa: E402
from ampopt.ort.session import Array, OnnxRunner, relative_error  # noqa: E402
from tests.support.image_graphs import Graph  # noqa: E402

BLOCK, WIDE, PADDED = 8, 28, 32
"""Seven groups of four channels, and eight."""

PLAIN = dataclasses.replace(SessionOptions(threads=1), optimization="none")


def image(runner: OnnxRunner, seed: int = 1) -> Array:
    shape = runner.inputs[0].fixed_shape
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def shapes_of(model: bytes) -> list[tuple[list[int], int]]:
    """The weights' shape and the groups of each convolution."""
    graph: Any = onnx.load_from_string(model).graph
    weights = {each.name: list(each.dims) for each in graph.initializer}
    found = []
    for node in graph.node:
        if node.op_type == "Conv":
            groups = next((each.i for each in node.attribute if each.name == "group"), 1)
            found.append((weights[node.input[1]], groups))
    return found


def check(model: bytes) -> bytes:
    """The model with padded groups, which is valid and gives the same numbers."""
    padded = with_padded_groups(model, BLOCK)
    assert padded is not None
    onnx.checker.check_model(onnx.load_from_string(padded), full_check=True)
    old, new = OnnxRunner(model, PLAIN), OnnxRunner(padded, PLAIN)
    x = image(old)
    for found, wanted in zip(new(x), old(x), strict=True):
        assert relative_error(found, wanted) < 1e-6
    return padded


@pytest.mark.parametrize(
    ("groups", "filters", "channels", "missing"),
    [
        (13, 8, 8, 1),
        (55, 8, 8, 1),
        (6, 8, 8, 0),
        (3, 4, 4, 0),  # a third more is too many
        (7, 1, 1, 0),  # depthwise
        (7, 4, 8, 1),
    ],
)
def test_groups_are_added_up_to_whole_blocks_of_16(
    groups: int, filters: int, channels: int, missing: int
) -> None:
    assert groups_to_add(groups, filters, channels, 16) == missing


def test_squeeze_and_excite_around_a_grouped_convolution_becomes_wider_as_a_whole() -> None:
    graph = Graph()
    x = graph.add("Relu", graph.conv("x", 16, WIDE))
    x = graph.squeeze(graph.add("Relu", graph.conv(x, WIDE, WIDE, 3, group=7)), WIDE)
    padded = check(graph.model(16, [graph.conv(x, WIDE, 24)]))
    assert shapes_of(padded) == [
        ([PADDED, 16, 1, 1], 1),
        ([PADDED, 4, 3, 3], 8),
        ([8, PADDED, 1, 1], 1),
        ([PADDED, 8, 1, 1], 1),
        ([24, PADDED, 1, 1], 1),
    ]


def test_two_grouped_convolutions_and_a_depthwise_one_in_a_row_are_padded_together() -> None:
    graph = Graph()
    x = graph.conv("x", 16, WIDE)
    for groups in (7, WIDE, 7):
        x = graph.add("Relu", graph.conv(x, WIDE, WIDE, 3, group=groups))
    padded = check(graph.model(16, [graph.conv(x, WIDE, 16)]))
    assert [groups for _, groups in shapes_of(padded)] == [1, 8, PADDED, 8, 1]


@pytest.mark.parametrize(
    "around", ["output", "input", "softmax", "root", "constant", "concat", "batch", "two results"]
)
def test_where_a_neighbour_cannot_be_wider_all_stay(around: str) -> None:
    graph = Graph()
    x = "x" if around == "input" else graph.conv("x", WIDE, WIDE)
    y = graph.conv(x, WIDE, WIDE, 3, group=7)
    outputs = []
    if around == "softmax":
        y = graph.plain(y)
    elif around == "root":
        y = graph.add("Sqrt", graph.add("Abs", y))
    elif around == "constant":
        y = graph.add("Mul", y, graph.constant(np.ones((1, WIDE, 1, 1), np.float32)))
    elif around == "concat":
        y = graph.add("Concat", y, y, axis=2)
    elif around == "batch":
        y = graph.add("ReduceMean", y, graph.constant(np.array([0, 1])), keepdims=1)
        y = graph.add("Expand", y, graph.constant(np.array([1, WIDE, 1, 1])))
    elif around == "two results":
        outputs = [graph.add("Relu", y)]
    end = y if around == "output" else graph.conv(y, WIDE, 16)
    assert with_padded_groups(graph.model(WIDE, [end, *outputs]), BLOCK) is None


def test_one_that_cannot_be_padded_does_not_keep_others_from_it() -> None:
    graph = Graph()
    stuck = graph.plain(graph.conv(graph.conv("x", 16, WIDE), WIDE, WIDE, 3, group=7))
    x = graph.conv(graph.conv(stuck, WIDE, WIDE), WIDE, WIDE, 3, group=7)
    padded = check(graph.model(16, [graph.conv(x, WIDE, 16)]))
    assert [groups for _, groups in shapes_of(padded)] == [1, 7, 1, 8, 1]


def test_weights_that_are_shared_are_padded_where_that_is_wanted_only() -> None:
    graph = Graph()
    first = graph.conv("x", 16, WIDE)
    other = graph.add("Conv", "x", *graph.nodes[-1].input[1:])
    x = graph.conv(first, WIDE, WIDE, 3, group=7)
    padded = check(graph.model(16, [graph.conv(x, WIDE, 16), other]))
    assert [weight[0] for weight, _ in shapes_of(padded)] == [PADDED, WIDE, PADDED, 16]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_blocks_compute_the_same(seed: int) -> None:
    chance = random.Random(seed)
    graph, wide = Graph(chance.choice([1, 2]), (chance.randint(2, 7), chance.randint(2, 7)), seed), 16
    x, can_be = "x", False
    for _ in range(chance.randint(1, 3)):
        groups, stays = chance.choice([4, 5, 6, 7, 9]), chance.random() < 0.2
        inner = 4 * groups
        y = graph.add(chance.choice(["Relu", "Sigmoid", "HardSwish"]), graph.conv(x, wide, inner))
        y = graph.conv(y, inner, inner, 3, group=groups)
        if chance.random() < 0.4:
            y = graph.add("Mul", y, graph.add("Sigmoid", y))
        if chance.random() < 0.5:
            y = graph.squeeze(y, inner)
        y = graph.conv(graph.plain(y) if stays else y, inner, wide)
        x = graph.add("Add", x, y) if x != "x" else y
        can_be |= groups % 2 == 1 and not stays
    model = graph.model(16, [x])
    if can_be:
        check(model)
    else:
        assert with_padded_groups(model, BLOCK) is None
