"""Groups narrower than a block of channels: computed alone they give what merged ones give."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
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

from ampopt.ort.blocked import block_size  # noqa: E402
from ampopt.ort.groups import with_merged_groups  # noqa: E402
from ampopt.ort.narrow_groups import WIDTHS, rearranged, width_of  # noqa: E402
from ampopt.ort.own_convolutions import quicker, with_own  # noqa: E402
from ampopt.ort.own_operators import own_library  # noqa: E402
from ampopt.ort.profile import optimized  # noqa: E402
from tests.support.compiler import needs_compiler  # noqa: E402
from tests.support.image_graphs import Graph, operators  # noqa: E402

pytestmark = needs_compiler

OPTIONS = SessionOptions(threads=2)
PLAIN = dataclasses.replace(OPTIONS, optimization="none")
NARROW = [width for width in WIDTHS if width < block_size()]


def runner(model: bytes) -> OnnxRunner:
    return OnnxRunner(model, PLAIN, library=own_library())


def image(model: OnnxRunner, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(model.inputs[0].fixed_shape).astype(np.float32)


def merged(model: bytes) -> bytes:
    """The model with its groups merged, as ONNX Runtime optimizes it."""
    wide = with_merged_groups(model)
    assert wide is not None
    return optimized(wide, OPTIONS)


def convolutions(chance: random.Random) -> tuple[bytes, int]:
    """Grouped convolutions, sums and activations on an image of any size, and how many there are."""
    block = block_size()
    size = chance.randint(12, 30), chance.randint(12, 40)
    graph = Graph(chance.choice([1, 1, 2]), size, chance.randrange(99))
    wide, x, count = block * chance.randint(1, 4), "x", chance.randint(1, 3)
    for _ in range(count):
        y = graph.conv(x, wide, wide, 3, group=wide // chance.choice(NARROW))
        kind = chance.choice(["pads", "stride", "sum", ""])
        if kind == "pads":
            pads = next(each for each in graph.nodes[-1].attribute if each.name == "pads")
            pads.ints[:] = [chance.randint(0, 2) for _ in range(4)]
        elif kind == "stride":
            graph.nodes[-1].attribute.append(onnx.helper.make_attribute("strides", [2, 2]))
        elif kind == "sum":
            y = graph.add("Add", y, graph.conv(x, wide, wide))
        x = graph.activated(y, chance.randrange(4))
    return graph.model(wide, [x]), count


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_graphs_compute_the_same(seed: int) -> None:
    model, count = convolutions(random.Random(seed))
    changed = with_own(merged(model), OPTIONS, "narrow")
    assert operators(changed)["NarrowConv"] == count
    old, new = OnnxRunner(model, OPTIONS), runner(changed)
    for each in range(2):
        x = image(old, each)
        assert relative_error(new(x)[0], old(x)[0]) < 1e-5


def blocks_of(width: int, count: int = 3) -> Array:
    """Weights as ONNX Runtime orders them, zero outside of groups of this width."""
    block = block_size()
    lanes = np.arange(block)
    weight = np.random.default_rng(0).standard_normal((count, 9, block, block)).astype(np.float32)
    weight[:, :, lanes[:, None] // width != lanes // width] = 0
    return weight.reshape(count * block, block, 3, 3)


@pytest.mark.parametrize("width", [*NARROW, 1])
def test_the_width_is_the_least_outside_of_which_there_are_zeros(width: int) -> None:
    assert width_of(blocks_of(width)) == max(width, NARROW[0])


def test_whole_blocks_have_no_width() -> None:
    weight = blocks_of(NARROW[0])
    assert width_of(blocks_of(block_size())) is None
    weight[0, 0, 0, 0] = np.nan
    assert width_of(weight) == NARROW[0]
    weight.reshape(-1, 9, block_size(), block_size())[1, 4, 0, -1] = 1e-30
    assert width_of(weight) is None


@pytest.mark.parametrize("width", NARROW)
def test_weights_are_ordered_for_the_kernel(width: int) -> None:
    weight, block = blocks_of(width), block_size()
    found = rearranged(weight)
    assert found.shape == (3 * block, 9 * width)
    blocks, own = weight.reshape(3, 9, block, block), found.reshape(3, 9, width, block)
    for lane in range(block):
        for channel in range(width):
            expected = blocks[:, :, lane // width * width + channel, lane]
            assert np.array_equal(own[:, :, channel, lane], expected)


@pytest.mark.parametrize("kind", ["stride", "dilation", "size", "activation", "whole blocks"])
def test_other_convolutions_stay(kind: str) -> None:
    wide = 4 * block_size()
    graph = Graph(1, (9, 9))
    groups = 4 if kind == "whole blocks" else wide // NARROW[-1]
    x = graph.conv("x", wide, wide, 5 if kind == "size" else 3, groups)
    if kind in ("stride", "dilation"):
        numbers = [1, 2] if kind == "stride" else [2, 2]
        graph.nodes[-1].attribute.append(onnx.helper.make_attribute(f"{kind}s", numbers))
    if kind == "activation":
        x = graph.add("Sigmoid", x)
    model = graph.model(wide, [x])
    found = optimized(with_merged_groups(model) or model, OPTIONS)
    assert operators(with_own(found, OPTIONS, "narrow"))["NarrowConv"] == 0


def test_what_is_not_a_number_stays_so_in_its_group() -> None:
    block, width = block_size(), NARROW[0]
    graph = Graph(1, (9, 9))
    model = graph.model(block, [graph.conv("x", block, block, 3, group=block // width)])
    old, new = OnnxRunner(model, OPTIONS), runner(with_own(merged(model), OPTIONS, "narrow"))
    x = image(old)
    x[0, 1, 4, 4] = np.nan
    wanted, found = old(x)[0], new(x)[0]
    assert np.isnan(wanted).sum() == 9 * width
    assert np.array_equal(np.isnan(found), np.isnan(wanted))


def test_narrow_groups_of_large_images_are_quicker() -> None:
    wide = 4 * block_size()
    graph = Graph(1, (56, 56))
    graph_model = merged(graph.model(wide, [graph.conv("x", wide, wide, 3, group=wide // 4)]))
    found = quicker(graph_model, PLAIN, [image(OnnxRunner(graph_model, PLAIN))])
    assert list(found.values()) == ["narrow"]


def planted(operands: Sequence[Array], **changed: int) -> OnnxRunner:
    """A session of one NarrowConv with operands of these shapes."""
    names = ["x", "u", "bias", "sum"][: len(operands)]
    pads = {f"pad_{side}": 1 for side in ("top", "left", "bottom", "right")}
    chosen = {**pads, "activation": 0, "stride": 1, "threads": 2, **changed}
    node = onnx.helper.make_node("NarrowConv", names, ["y"], domain="ampopt", alpha=0.0, beta=0.0, **chosen)
    make = onnx.helper.make_tensor_value_info
    inputs = [make(n, 1, list(each.shape)) for n, each in zip(names, operands, strict=True)]
    graph = onnx.helper.make_graph([node], "g", inputs, [make("y", 1, None)])
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ampopt", 1)]
    return runner(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


@pytest.mark.parametrize(
    ("shapes", "attributes"),
    [
        (((1, 16, 5), (16, 36)), {}),
        (((1, 12, 5, 5), (16, 36)), {}),
        (((1, 32, 5, 5), (16, 36)), {}),
        (((1, 16, 5, 5), (16, 35)), {}),
        (((1, 16, 5, 5), (16, 27)), {}),
        (((1, 16, 5, 5), (16, 36), (8,)), {}),
        (((1, 16, 5, 5), (16, 36), (16,), (1, 16, 5, 4)), {}),
        (((1, 16, 0, 5), (16, 36)), {}),
        (((1, 16, 5, 5), (16, 36)), {"stride": 0}),
        (((1, 16, 5, 5), (16, 36)), {"stride": 3}),
        (((1, 16, 5, 5), (16, 36)), {"pad_top": -1}),
        (((1, 16, 1, 0), (16, 36)), {"pad_left": 4, "pad_right": 0, "stride": 2}),
    ],
)
def test_operands_that_do_not_fit_are_an_error_and_the_session_goes_on(
    shapes: Any, attributes: dict[str, int]
) -> None:
    operands = [np.ones(shape, np.float32) for shape in shapes]
    session = planted(operands, **attributes)
    for _ in range(2):
        with pytest.raises(SessionError, match=r"do not fit each other|has 4 dimensions"):
            session(*operands)


def test_a_batch_of_none_is_empty() -> None:
    operands = [np.ones((0, 16, 5, 5), np.float32), np.ones((16, 36), np.float32)]
    assert planted(operands)(*operands)[0].shape == (0, 16, 5, 5)


def test_sessions_and_threads_do_not_mix() -> None:
    chance = random.Random(5)
    models = [convolutions(chance)[0] for _ in range(4)]
    old = [OnnxRunner(model, OPTIONS) for model in models]
    new = [runner(with_own(merged(model), OPTIONS, "narrow")) for model in models]
    jobs = [(index % 4, seed) for seed in range(8) for index in range(4)]
    wanted = [old[index](image(old[index], seed))[0] for index, seed in jobs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: new[job[0]](image(old[job[0]], job[1]))[0], jobs))
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))
