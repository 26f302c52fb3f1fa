"""Winograd's algorithm in ONNX Runtime's blocked graphs: the same convolution, whatever its shape."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampopt.ort import own_convolutions
from ampopt.ort.options import SessionError, SessionOptions
from ampopt.ort.session import Array, OnnxRunner, relative_error

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from ampopt.ort.blocked import block_size  # noqa: E402
from ampopt.ort.own_convolutions import quicker, with_own  # noqa: E402
from ampopt.ort.own_operators import own_library  # noqa: E402
from ampopt.ort.profile import node_seconds, optimized  # noqa: E402
from ampopt.ort.winograd import POINTS, TILES, transformed, weight_transform  # noqa: E402
from tests.support.compiler import needs_compiler  # noqa: E402
from tests.support.image_graphs import Graph, operators  # noqa: E402

pytestmark = needs_compiler

OPTIONS = SessionOptions(threads=2)
PLAIN = dataclasses.replace(OPTIONS, optimization="none")


def runner(model: bytes) -> OnnxRunner:
    return OnnxRunner(model, PLAIN, library=own_library())


def with_winograd(model: bytes, tile: int) -> bytes:
    return with_own(model, OPTIONS, {2: "winograd", 4: "winograd4"}[tile])


def image(model: OnnxRunner, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(model.inputs[0].fixed_shape).astype(np.float32)


def kernel_transforms(tile: int) -> tuple[Array, Array]:
    """Bᵀ and Aᵀ by the formulas of Toom and Cook for the points, independent of the kernel's own."""
    points, size = np.array(POINTS[tile]), tile + 2
    after = np.vstack([points[:, None] ** np.arange(tile), np.eye(tile)[-1]]).T
    before = np.zeros((size, size))
    for row, others in enumerate([*(np.delete(points, each) for each in range(len(points))), points]):
        coefficients = np.poly(others)[::-1]
        before[row, : len(coefficients)] = coefficients
    return before, after


@pytest.mark.parametrize("tile", TILES)
def test_the_transforms_give_a_convolution_over_the_real_numbers(tile: int) -> None:
    rng, size = np.random.default_rng(0), tile + 2
    patch, weight = rng.standard_normal((size, size)), rng.standard_normal((3, 3))
    before, after = kernel_transforms(tile)
    g = weight_transform(tile)
    product = (before @ patch @ before.T) * (g @ weight @ g.T)
    direct = [[np.sum(patch[i : i + 3, j : j + 3] * weight) for j in range(tile)] for i in range(tile)]
    assert np.allclose(after @ product @ after.T, direct, atol=1e-13)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("filters", "channels"), [(8, 8), (16, 24), (24, 8)])
def test_weights_are_ordered_for_the_kernel(filters: int, channels: int, tile: int) -> None:
    weight = np.random.default_rng(0).standard_normal((filters, channels, 3, 3)).astype(np.float32)
    flat, positions, g = transformed(weight, 8, tile).ravel(), (tile + 2) ** 2, weight_transform(tile)
    for k, c in ((0, 0), (filters - 1, channels - 1), (filters // 2, 3)):
        start = k // 16 * 16
        width = min(16, filters - start)
        group = flat[start * positions * channels :][: positions * channels * width]
        expected = g @ weight[k, c].astype(np.float64) @ g.T
        found = group.reshape(positions, channels, width)[:, c, k - start]
        assert np.allclose(found, expected.ravel(), rtol=1e-6, atol=1e-7)


def convolutions(chance: random.Random) -> tuple[bytes, int]:
    """A few convolutions, sums and activations on an image of any size, and how many can be Winograd's."""
    block = block_size()
    size = chance.randint(1, 19), chance.randint(1, 19)
    graph = Graph(chance.choice([1, 1, 2]), size, chance.randrange(99))
    wide, x, count = block * chance.randint(1, 4), "x", 0
    width = wide
    for _ in range(chance.randint(1, 4)):
        before, next_wide = x, block * chance.randint(1, 4)
        x = graph.conv(x, wide, next_wide, 3)
        count += 1
        if wide == next_wide and chance.random() < 0.5:
            x = graph.add("Add", x, graph.conv(before, wide, wide))
        x = graph.activated(x, chance.randrange(4))
        wide = next_wide
    return graph.model(width, [x]), count


ERRORS = {2: 2e-6, 4: 8e-6}
"""Largest relative error of a few convolutions in a row."""


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), tile=st.sampled_from(TILES))
def test_random_graphs_compute_the_same(seed: int, tile: int) -> None:
    model, count = convolutions(random.Random(seed))
    changed = with_winograd(optimized(model, OPTIONS), tile)
    assert operators(changed)["WinogradConv"] == count
    old, new = OnnxRunner(model, OPTIONS), runner(changed)
    for each in range(2):
        x = image(old, each)
        for found, wanted in zip(new(x), old(x), strict=True):
            assert relative_error(found, wanted) < ERRORS[tile]


@pytest.mark.parametrize(("tile", "most"), [(2, 3.0), (4, 9.0)])
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 1), (2, 1, 1, 2)])
def test_any_padding_is_right_and_the_error_is_a_few_times_a_direct_convolutions(
    pads: tuple[int, ...], tile: int, most: float
) -> None:
    wide = 8 * block_size()
    graph = Graph(1, (13, 10), 3)
    x = graph.conv("x", wide, wide, 3)
    next(each for each in graph.nodes[-1].attribute if each.name == "pads").ints[:] = pads
    model = graph.model(wide, [x])
    old, new = OnnxRunner(model, OPTIONS), runner(with_winograd(optimized(model, OPTIONS), tile))
    given = image(old)
    weight, bias = (torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.constants)
    top, left, bottom, right = pads
    padded = torch.nn.functional.pad(torch.from_numpy(given).double(), (left, right, top, bottom))
    exact = torch.nn.functional.conv2d(padded, weight.double(), bias.double()).numpy()
    own, found = (relative_error(each(given)[0], exact) for each in (old, new))
    assert found < most * own
    assert found < 2e-6


@pytest.mark.parametrize("tile", TILES)
def test_what_is_not_a_number_stays_so(tile: int) -> None:
    wide = block_size()
    graph = Graph(1, (9, 9))
    x = graph.add("Relu", graph.conv("x", wide, wide, 3))
    model = graph.model(wide, [x])
    old, new = OnnxRunner(model, OPTIONS), runner(with_winograd(optimized(model, OPTIONS), tile))
    given = image(old)
    given[0, 1, 8, 4] = np.nan
    direct, found = old(given)[0], new(given)[0]
    assert np.isnan(direct).any()
    assert np.isnan(found[np.isnan(direct)]).all()
    far = np.s_[..., :2, :]
    assert relative_error(found[far], direct[far]) < 1e-6


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), tile=st.sampled_from(TILES))
def test_with_the_weights_themselves_faults_reach_what_they_reach_in_a_convolution(
    seed: int, tile: int
) -> None:
    chance, rng, block = random.Random(seed), np.random.default_rng(seed), block_size()
    graph, wide = (
        Graph(chance.choice([1, 2]), (chance.randint(1, 15), chance.randint(1, 15)), seed),
        2 * block,
    )
    x, activation = graph.conv("x", wide, wide, 3), chance.randrange(3)
    weight, bias = (onnx.numpy_helper.to_array(each).copy() for each in graph.constants)
    weight[rng.random(weight.shape) < 0.4] = 0.0
    graph.constants[0] = onnx.numpy_helper.from_array(weight, graph.constants[0].name)
    is_sum = chance.random() < 0.5
    x = graph.activated(graph.add("Add", x, "x") if is_sum else x, activation)
    model = optimized(graph.model(wide, [x]), OPTIONS)
    changed = with_own(model, OPTIONS, {2: "winograd", 4: "winograd4"}[tile], exact=True)
    assert operators(changed)["WinogradConv"] == 1
    given = image(session := runner(changed), seed)
    for _ in range(chance.randint(1, 4)):
        given.flat[chance.randrange(given.size)] = chance.choice([np.nan, np.inf, -np.inf])
    inside, weights, biases = (torch.from_numpy(each).double() for each in (given, weight, bias))
    wanted = torch.nn.functional.conv2d(inside, weights, biases, padding=1)
    wanted = wanted + inside if is_sum else wanted
    wanted = (wanted, wanted.relu(), torch.nn.functional.leaky_relu(wanted, 0.2))[activation]
    direct, found = wanted.float().numpy(), session(given)[0]
    for is_fault in (np.isnan, np.isposinf, np.isneginf):
        assert (is_fault(found) == is_fault(direct)).all()
    found, direct = (np.where(np.isfinite(each), each, 0) for each in (found, direct))
    assert relative_error(found, direct) < ERRORS[tile]


@pytest.mark.parametrize("kind", ["stride", "dilation", "group", "size", "activation"])
def test_other_convolutions_stay(kind: str) -> None:
    wide = 2 * block_size()
    graph = Graph(1, (9, 9))
    x = graph.conv(
        "x", wide, wide, 1 if kind == "size" else 3, wide // block_size() if kind == "group" else 1
    )
    if kind in ("stride", "dilation"):
        graph.nodes[-1].attribute.append(onnx.helper.make_attribute(f"{kind}s", [2, 1]))
    if kind == "activation":
        x = graph.add("Sigmoid", x)
    found = optimized(graph.model(wide, [x]), OPTIONS)
    assert operators(with_winograd(found, 4))["WinogradConv"] == 0


def some_convolutions(count: int = 3) -> tuple[bytes, list[str]]:
    wide, x = block_size(), "x"
    graph = Graph(1, (9, 9))
    for _ in range(count):
        x = graph.add("Relu", graph.conv(x, wide, wide, 3))
    found = optimized(graph.model(wide, [x]), OPTIONS)
    return found, [n.output[0] for n in onnx.load_from_string(found).graph.node if n.op_type == "Conv"]


def test_those_that_are_quicker_are_named_and_only_they_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = some_convolutions()
    x = image(OnnxRunner(model, PLAIN))
    times = node_seconds(model, PLAIN, [x])
    assert all(0 < seconds < 1 for seconds in times.values())
    first, second, third = names
    calls = iter(
        [
            dict.fromkeys(names, 2.0),  # directly
            {first: 3.0, second: 1.0, third: 1.5},  # tiles of 2
            {first: 3.0, second: 1.5, third: 1.0},  # tiles of 4
        ]
    )
    monkeypatch.setattr(own_convolutions, "node_seconds", lambda *_, **__: next(calls))
    chosen = quicker(model, PLAIN, [x])
    assert chosen == {second: "winograd", third: "winograd4"}
    changed = with_own(model, PLAIN, chosen)
    assert operators(changed)["Conv"] == 1
    assert operators(changed)["WinogradConv"] == 2
    assert relative_error(runner(changed)(x)[0], OnnxRunner(model, PLAIN)(x)[0]) < 2e-6


def test_weights_may_be_shared_and_have_any_name() -> None:
    model = onnx.load_from_string(some_convolutions(2)[0])
    first, second = (node for node in model.graph.node if node.op_type == "Conv")
    second.input[1] = first.input[1]
    taken = f"{first.input[1]}_winograd4"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), taken))
    model.graph.node.append(onnx.helper.make_node("Neg", [taken], ["other"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("other", 1, [3]))
    data = model.SerializeToString()
    old, changed = OnnxRunner(data, PLAIN), with_winograd(data, 4)
    assert operators(changed)["WinogradConv"] == 2
    x = image(old)
    for found, wanted in zip(runner(changed)(x), old(x), strict=True):
        assert relative_error(found, wanted) < 1e-6


def test_convolutions_are_timed_one_by_one() -> None:
    model, names = some_convolutions()
    found = quicker(model, PLAIN, [image(OnnxRunner(model, PLAIN))])
    assert set(found) <= set(names)
    assert set(found.values()) <= {"winograd", "winograd4"}


def test_where_there_are_none_nothing_is_compiled_or_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_convolutions, "own_library", lambda: pytest.fail("compiled"))
    graph = Graph(1, (9, 9))
    model = optimized(graph.model(block_size(), [graph.conv("x", block_size(), block_size())]), OPTIONS)
    assert quicker(model, PLAIN, []) == {}


def planted(x: Sequence[int], u: Sequence[int], *others: Sequence[int]) -> bytes:
    """A model of one WinogradConv with operands of these shapes."""
    names = ["x", "u", "bias", "sum", "w"][: 2 + len(others)]
    pads = {f"pad_{side}": 1 for side in ("top", "left", "bottom", "right")}
    settings = {**pads, "activation": 0, "alpha": 0.0, "beta": 0.0, "threads": 2, "stride": 1}
    node = onnx.helper.make_node("WinogradConv", names, ["y"], domain="ampopt", **settings)
    make = onnx.helper.make_tensor_value_info
    inputs = [make(n, 1, list(shape)) for n, shape in zip(names, (x, u, *others), strict=True)]
    graph = onnx.helper.make_graph([node], "g", inputs, [make("y", 1, None)])
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ampopt", 1)]
    data: bytes = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return data


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 16, 5, 5), (16, 16 * 8)),
        ((1, 16, 5), (16, 16 * 16)),
        ((1, 12, 5, 5), (16, 16 * 12)),
        ((1, 16, 5, 5), (12, 16 * 16)),
        ((1, 16, 5, 5), (16, 16 * 16), (8,)),
        ((1, 16, 5, 5), (16, 16 * 16), (16,), (1, 16, 5, 4)),
        ((1, 16, 0, 5), (16, 16 * 16)),
        ((1, 16, 0, 5), (16, 36 * 16)),
        ((1, 16, 5, 5), (16, 36 * 16), (8,)),
        ((1, 16, 5, 5), (16, 36 * 16), (16,), (1, 16, 5, 5), (16, 8, 3, 3)),
    ],
)
def test_operands_that_do_not_fit_are_an_error_and_the_session_goes_on(shapes: Any) -> None:
    session = runner(planted(*shapes))
    operands = [np.ones(shape, np.float32) for shape in shapes]
    for _ in range(2):
        with pytest.raises(SessionError, match=r"do not fit each other|has 4 dimensions"):
            session(*operands)


def test_a_batch_of_none_is_empty() -> None:
    session = runner(planted((0, 16, 5, 5), (16, 16 * 16)))
    assert session(np.ones((0, 16, 5, 5), np.float32), np.ones((16, 256), np.float32))[0].shape == (
        0,
        16,
        5,
        5,
    )


def test_sessions_and_threads_do_not_mix() -> None:
    chance = random.Random(5)
    models = [convolutions(chance)[0] for _ in range(4)]
    old = [OnnxRunner(model, OPTIONS) for model in models]
    tiles = [2, 4, 4, 2]
    new = [
        runner(with_winograd(optimized(model, OPTIONS), tile))
        for model, tile in zip(models, tiles, strict=True)
    ]
    jobs = [(index % 4, seed) for seed in range(10) for index in range(4)]
    wanted = [old[index](image(old[index], seed))[0] for index, seed in jobs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: new[job[0]](image(old[job[0]], job[1]))[0], jobs))
    assert all(relative_error(a, b) < ERRORS[4] for a, b in zip(found, wanted, strict=True))
