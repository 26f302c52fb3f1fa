"""Chains of narrow convolutions as one operator: the same convolutions, whatever their shapes and order."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampopt.ort.options import SessionError, SessionOptions
from ampopt.ort.session import Array, OnnxRunner, relative_error

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from ampopt.ort.chains import MOST_CHANNELS, Chain, _Graph, packed, parts, with_chains  # noqa: E402
from ampopt.ort.own_operators import own_library  # noqa: E402
from tests.support.compiler import needs_compiler  # noqa: E402
from tests.support.image_graphs import Graph, operators  # noqa: E402

pytestmark = needs_compiler

OPTIONS = SessionOptions(threads=2)

ROUNDING = 2e-5
"""Largest error of random chains: an activation may leave a few small numbers of large sums."""


def chains_of(model: bytes) -> list[Chain]:
    return list(_Graph(onnx.load_from_string(model).graph).chains())


def chained(model: bytes, options: SessionOptions = OPTIONS) -> bytes:
    return with_chains(model, options, [chain.name for chain in chains_of(model)])


def runner(model: bytes, options: SessionOptions = OPTIONS) -> OnnxRunner:
    return OnnxRunner(model, options, library=own_library())


def image(model: OnnxRunner, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(model.inputs[0].fixed_shape).astype(np.float32)


def convolution(
    graph: Graph,
    x: str,
    inside: int,
    outside: int,
    kernel: tuple[int, int],
    dilations: tuple[int, int] = (1, 1),
    shift: tuple[int, int] = (0, 0),
    bias: bool = True,
) -> str:
    """A convolution that keeps the size; `shift` moves padding from the end to the beginning."""
    reach = [(size - 1) * d for size, d in zip(kernel, dilations, strict=True)]
    begin = [min(r // 2 + s, r) for r, s in zip(reach, shift, strict=True)]
    weight = graph.rng.standard_normal((outside, inside, *kernel)) / np.sqrt(inside * np.prod(kernel))
    names = [graph.constant(weight.astype(np.float32))]
    if bias:
        names.append(graph.constant(graph.rng.standard_normal(outside).astype(np.float32)))
    pads = [*begin, *(r - b for r, b in zip(reach, begin, strict=True))]
    return graph.add("Conv", x, *names, kernel_shape=kernel, dilations=dilations, pads=pads)


def some_chain(chance: random.Random) -> bytes:
    """Convolutions one after another with sums of earlier results, on an image of any size."""
    wide = 1200 if chance.random() < 0.2 else 50
    size = chance.randint(1, 30), chance.randint(1, wide)
    graph = Graph(chance.choice([1, 1, 2, 3]), size, chance.randrange(99))
    first = width = chance.randint(1, MOST_CHANNELS)
    x, before = "x", [("x", width)]
    for _ in range(chance.randint(2, 6)):
        same = [name for name, other in before[-3:] if other == width]
        outside = width if same and chance.random() < 0.5 else chance.randint(1, MOST_CHANNELS)
        kernel, dilations, shift = ((chance.randint(1, n), chance.randint(1, n)) for n in (4, 2, 2))
        shift = (shift[0] - 1, shift[1] - 1)
        y = convolution(graph, x, width, outside, kernel, dilations, shift, bias=chance.random() < 0.7)
        if outside == width and same and chance.random() < 0.7:
            y = graph.add("Add", *chance.sample([y, same[0]], 2))
        x, width = graph.activated(y, chance.randrange(4)), outside
        before.append((x, width))
    return graph.model(first, [x])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), threads=st.sampled_from([1, 2, 3]))
def test_random_chains_compute_the_same(seed: int, threads: int) -> None:
    model, options = some_chain(random.Random(seed)), SessionOptions(threads=threads)
    found = chained(model, options)
    assert operators(found)["ConvChain"] >= 1
    assert operators(found)["Conv"] < operators(model)["Conv"] - 1
    old, new = OnnxRunner(model, options), runner(found, options)
    for each in range(2):
        x = image(old, each)
        assert relative_error(new(x)[0], old(x)[0]) < ROUNDING


def residual_blocks(size: tuple[int, int], blocks: int = 2, *, outputs: int = 1) -> bytes:
    """EncDecMil18's blocks: narrow, (5, 1), (1, 5), wide, plus what was there before."""
    graph = Graph(1, size)
    x, results = "x", list[str]()
    for _ in range(blocks):
        y = graph.add("Relu", convolution(graph, x, 16, 8, (1, 1)))
        y = convolution(graph, y, 8, 8, (5, 1), bias=False)
        y = graph.add("Relu", convolution(graph, y, 8, 8, (1, 5)))
        x = graph.add("Relu", graph.add("Add", convolution(graph, y, 8, 16, (1, 1)), x))
        results.append(x)
    return graph.model(16, results[-outputs:])


@pytest.mark.parametrize("size", [(3, 2000), (400, 7), (64, 64), (1, 1)])
def test_blocks_with_sums_are_one_operator_at_any_size(size: tuple[int, int]) -> None:
    model = residual_blocks(size)
    found = chained(model)
    assert operators(found) == {"ConvChain": 1}
    assert [len(chain.steps) for chain in chains_of(model)] == [8]
    old, new = OnnxRunner(model, OPTIONS), runner(found)
    x = image(old)
    assert relative_error(new(x)[0], old(x)[0]) < 1e-6


def test_what_something_outside_reads_is_a_result() -> None:
    model = residual_blocks((9, 9), outputs=2)
    found = chained(model)
    assert operators(found) == {"ConvChain": 2}
    old, new = OnnxRunner(model, OPTIONS), runner(found)
    x = image(old)
    for got, wanted in zip(new(x), old(x), strict=True):
        assert relative_error(got, wanted) < 1e-6


def test_a_shortcut_with_a_convolution_is_part_of_its_chain() -> None:
    graph = Graph(1, (12, 10))
    y = graph.add("Relu", convolution(graph, "x", 8, 12, (3, 3)))
    y = convolution(graph, y, 12, 12, (3, 3))
    x = graph.add("Relu", graph.add("Add", y, convolution(graph, "x", 8, 12, (1, 1))))
    model = graph.model(8, [x])
    assert operators(chained(model)) == {"ConvChain": 1}
    old, new = OnnxRunner(model, OPTIONS), runner(chained(model))
    given = image(old)
    assert relative_error(new(given)[0], old(given)[0]) < 1e-6


def test_branches_of_one_input_are_chains_of_their_own() -> None:
    graph = Graph(1, (12, 10))
    ends = []
    for width in (4, 7):
        y = graph.add("Relu", convolution(graph, "x", 8, width, (1, 1)))
        ends.append(graph.add("Relu", convolution(graph, y, width, width, (3, 3))))
    model = graph.model(8, [graph.add("Concat", *ends, axis=1)])
    found = chained(model)
    assert operators(found) == {"ConvChain": 2, "Concat": 1}
    old, new = OnnxRunner(model, OPTIONS), runner(found)
    given = image(old)
    assert relative_error(new(given)[0], old(given)[0]) < 1e-6


@pytest.mark.parametrize(
    "kind", ["stride", "group", "wide", "valid", "far", "sum of one row", "infinite", "computed"]
)
def test_other_convolutions_stay(kind: str) -> None:
    graph, width = Graph(1, (12, 12)), MOST_CHANNELS + 1 if kind == "wide" else 8
    y = graph.add("Relu", convolution(graph, "x", width, width, (40, 1) if kind == "far" else (3, 3)))
    attributes = {each.name: each for each in graph.nodes[0].attribute}
    if kind == "stride":
        graph.nodes[0].attribute.append(onnx.helper.make_attribute("strides", [1, 2]))
    elif kind == "group":
        y = graph.conv(y, 8, 8, 3, group=4)
    elif kind == "valid":
        attributes["pads"].ints[:] = [0] * 4
    elif kind == "infinite":
        graph.constants[0].CopyFrom(
            onnx.numpy_helper.from_array(np.full((8, 8, 3, 3), np.inf, np.float32), "c0")
        )
    elif kind == "computed":
        graph.nodes[0].input[1] = graph.add("Neg", graph.nodes[0].input[1])
        graph.nodes.insert(0, graph.nodes.pop())
    elif kind == "sum of one row":
        row = graph.constant(np.ones((1, 8, 1, 12), np.float32))
        y = graph.add("Add", y, row)
        y = graph.add("Add", convolution(graph, y, 8, 8, (1, 1)), row)
    model = graph.model(width, [graph.plain(y)])
    assert chains_of(model) == []


def test_a_sum_with_another_number_of_channels_is_not_fused() -> None:
    graph = Graph(1, (6, 6))
    y = convolution(graph, "x", 1, 4, (3, 3))
    z = convolution(graph, y, 4, 4, (3, 3))
    model = graph.model(1, [graph.add("Add", z, "x")])
    found = chained(model)
    assert operators(found) == {"ConvChain": 1, "Add": 1}
    old, new = OnnxRunner(model, OPTIONS), runner(found)
    x = image(old)
    assert relative_error(new(x)[0], old(x)[0]) < 1e-6


def test_what_is_not_a_number_reaches_what_a_convolution_reaches_and_no_more() -> None:
    model = residual_blocks((40, 41))
    old, new = OnnxRunner(model, OPTIONS), runner(chained(model))
    x = image(old)
    x[0, 3, 20, 20] = np.nan
    wanted, found = old(x)[0], new(x)[0]
    assert np.isnan(wanted).any()
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    assert relative_error(found, wanted) < 1e-6


def test_only_the_chains_that_are_named_are_replaced() -> None:
    model = residual_blocks((9, 9), outputs=2)
    first, second = chains_of(model)
    found = with_chains(model, OPTIONS, [second.name])
    assert operators(found)["ConvChain"] == 1
    assert operators(found)["Conv"] == len(first.steps)
    assert operators(with_chains(model, OPTIONS, ["nobody"])) == operators(model)


def test_weights_that_others_read_stay() -> None:
    model = onnx.load_from_string(residual_blocks((9, 9), blocks=1))
    shared = model.graph.node[0].input[1]
    model.graph.node.append(onnx.helper.make_node("Neg", [shared], ["other"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("other", 1, None))
    found = onnx.load_from_string(chained(model.SerializeToString()))
    stored = {each.name for each in found.graph.initializer}
    assert shared in stored
    assert len(stored) == 3


def test_parts_are_models_of_a_chain_each() -> None:
    model = residual_blocks((9, 11), outputs=2)
    found = parts(model)
    assert list(found) == [chain.name for chain in chains_of(model)]
    for part, shape in found.values():
        assert shape == (1, 16, 9, 11)
        old, new = OnnxRunner(part, OPTIONS), runner(chained(part))
        x = image(old)
        assert relative_error(new(x)[0], old(x)[0]) < 1e-6


def test_parts_of_unknown_size_are_left_out() -> None:
    model = onnx.load_from_string(residual_blocks((9, 11)))
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    assert parts(model.SerializeToString()) == {}


@pytest.mark.parametrize(("block", "widths"), [(16, [8, 2, 1]), (8, [4, 4, 2, 1])])
def test_weights_are_ordered_for_the_kernel(block: int, widths: list[int]) -> None:
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((11, 3, 2, 5)), rng.standard_normal(11)
    flat, start, filters = packed(weight, bias, block), 0, 0
    for width in widths:
        own = slice(filters, filters + width)
        assert np.allclose(flat[start : start + width], bias[own])
        values = flat[start + width : start + width * 31].reshape(3, 2, 5, width)
        assert np.allclose(values, np.moveaxis(weight[own], 0, -1))
        start, filters = start + width * 31, filters + width
    assert start == flat.size


def planted(shape: tuple[int, ...], program: Any, weights: int) -> tuple[OnnxRunner, list[Array]]:
    """A session of one ConvChain with any operands, and these."""
    node = onnx.helper.make_node("ConvChain", ["x", "p", "w"], ["y"], domain="ampopt", threads=2)
    operands = [
        np.ones(shape, np.float32),
        np.asarray(program, np.float32),
        np.ones(weights, np.float32),
    ]
    make = onnx.helper.make_tensor_value_info
    inputs = [make(name, 1, list(each.shape)) for name, each in zip("xpw", operands, strict=True)]
    graph = onnx.helper.make_graph([node], "g", inputs, [make("y", 1, None)])
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ampopt", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return runner(model.SerializeToString(), dataclasses.replace(OPTIONS, optimization="none")), operands


STEP = [0, -1, 2, 3, 3, 3, 1, 1, 1, 1, 0, 0.0, 0.0]
"""2 channels to 3 by a 3x3 kernel, which has 57 weights and biases."""


def changed(**numbers: float) -> list[float]:
    names = ["source", "addend", "channels", "filters", "height", "width"]
    names += ["dilation_y", "dilation_x", "top", "left", "activation"]
    row = list(STEP)
    for name, number in numbers.items():
        row[names.index(name)] = number
    return row


@pytest.mark.parametrize(
    ("shape", "program", "weights"),
    [
        ((1, 2, 5, 5), [STEP], 56),
        ((1, 3, 5, 5), [STEP], 57),
        ((1, 2, 0, 5), [STEP], 57),
        ((2, 5, 5), [STEP], 57),
        ((1, 2, 5, 5), [STEP[:-1]], 57),
        ((1, 2, 5, 5), [STEP, changed(source=1)], 114),
        ((1, 2, 5, 5), [changed(source=1)], 57),
        ((1, 2, 5, 5), [changed(source=-1)], 57),
        ((1, 2, 5, 5), [changed(addend=0)], 57),
        ((1, 2, 5, 5), [changed(addend=1)], 57),
        ((1, 2, 5, 5), [changed(top=3)], 57),
        ((1, 2, 5, 5), [changed(left=-1)], 57),
        ((1, 2, 5, 5), [changed(filters=0)], 57),
        ((1, 2, 5, 5), [changed(channels=-1)], 57),
        ((1, 2, 5, 5), [changed(height=1e30)], 57),
        ((1, 2, 5, 5), [changed(width=float("nan"))], 57),
        ((1, 2, 500, 5), [changed(height=100, top=0)], 3 * (1 + 2 * 300)),
    ],
)
def test_operands_that_do_not_fit_are_an_error_and_the_session_goes_on(
    shape: tuple[int, ...], program: Any, weights: int
) -> None:
    session, operands = planted(shape, program, weights)
    for _ in range(2):
        with pytest.raises(SessionError, match=r"ConvChain|X has 4 dimensions"):
            session(*operands)


def test_a_batch_of_none_is_empty() -> None:
    session, operands = planted((0, 2, 5, 5), [STEP], 57)
    assert session(*operands)[0].shape == (0, 3, 5, 5)


def test_sessions_and_threads_do_not_mix() -> None:
    chance = random.Random(5)
    models = [some_chain(chance) for _ in range(4)]
    old, new = [OnnxRunner(m, OPTIONS) for m in models], [runner(chained(m)) for m in models]
    jobs = [(index % 4, seed) for seed in range(6) for index in range(4)]
    wanted = [old[index](image(old[index], seed))[0] for index, seed in jobs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: new[job[0]](image(old[job[0]], job[1]))[0], jobs))
    assert all(relative_error(a, b) < ROUNDING for a, b in zip(found, wanted, strict=True))
