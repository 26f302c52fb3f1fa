"""Narrow groups of a convolution are merged into whole blocks: the same function, where it is quicker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from onnx import helper, load_from_string  # noqa: E402

from ampopt.ort import groups as onnx_groups  # noqa: E402
from ampopt.ort.groups import is_quicker_merged, merged, with_merged_groups  # noqa: E402
from ampopt.ort.options import SessionOptions  # noqa: E402
from ampopt.ort.profile import named, optimized  # noqa: E402
from ampopt.ort.session import Array, OnnxRunner, relative_error  # noqa: E402
from ampopt.system.native import CompilerError  # noqa: E402
from tests.support.compiler import needs_compiler  # noqa: E402
from tests.support.onnx_models import model  # noqa: E402


@pytest.fixture(autouse=True)
def blocks_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor with AVX2."""
    monkeypatch.setattr(onnx_groups, "block_size", lambda: 8)


def numbers(*shape: int) -> Array:
    made: Array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return made


def convolutions(*kinds: tuple[int, int, int], size: int = 6) -> bytes:
    """A model of convolutions one after the other, each of (channels, filters, groups)."""
    nodes, constants, last = [], {}, "x"
    for place, (channels, filters, groups) in enumerate(kinds):
        constants[f"w{place}"] = numbers(filters, channels // groups, 3, 3)
        attributes: dict[str, Any] = {"group": groups} if groups > 1 else {}
        nodes.append(
            helper.make_node("Conv", [last, f"w{place}"], [f"y{place}"], pads=[1, 1, 1, 1], **attributes)
        )
        last = f"y{place}"
    shape = {"x": [1, kinds[0][0], size, size]}
    return model(nodes, shape, {last: [1, kinds[-1][1], size, size]}, constants)


def groups_of(data: bytes | None) -> list[int]:
    assert data is not None
    nodes: Any = load_from_string(data).graph.node
    return [next((a.i for a in node.attribute if a.name == "group"), 1) for node in nodes]


@pytest.mark.parametrize(
    ("filters", "channels", "groups", "count"), [(4, 4, 8, 2), (2, 4, 8, 4), (8, 1, 6, 3)]
)
def test_merged_weights_give_what_the_groups_give(
    filters: int, channels: int, groups: int, count: int
) -> None:
    weight = torch.from_numpy(numbers(filters * groups, channels, 3, 3)).double()
    x = torch.from_numpy(numbers(2, channels * groups, 7, 7)).double()
    wide = torch.from_numpy(merged(weight.numpy(), groups, count))
    assert wide.shape == (filters * groups, channels * count, 3, 3)
    found, wanted = F.conv2d(x, wide, groups=groups // count), F.conv2d(x, weight, groups=groups)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_model_with_merged_groups_computes_the_same() -> None:
    data = convolutions((32, 32, 8), (32, 64, 8), (64, 64, 1))
    wide, x = with_merged_groups(data), numbers(1, 32, 6, 6)
    assert groups_of(wide) == [4, 4, 1]
    assert wide is not None
    (found,), (wanted,) = (OnnxRunner(each, SessionOptions())(x) for each in (wide, data))
    assert relative_error(found, wanted) < 1e-5


def test_weights_that_two_convolutions_share_are_merged_for_each() -> None:
    nodes = [
        helper.make_node("Conv", [source, "w"], [result], group=8, pads=[1, 1, 1, 1])
        for source, result in ("xa", "ab")
    ]
    shape = [1, 32, 6, 6]
    data = model(nodes, {"x": shape}, {"b": shape}, {"w": numbers(32, 4, 3, 3)})
    wide, x = with_merged_groups(data), numbers(*shape)
    assert groups_of(wide) == [4, 4]
    assert [each.name for each in load_from_string(wide or b"").graph.initializer] == [
        "w_merged",
        "w_merged_",
    ]
    assert wide is not None
    (found,), (wanted,) = (OnnxRunner(each, SessionOptions())(x) for each in (wide, data))
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize(
    "kind",
    [(16, 16, 1), (16, 16, 16), (32, 32, 4), (12, 12, 3), (30, 30, 6)],
    ids=["no groups", "depthwise", "whole blocks", "too few channels", "no number of groups fits"],
)
def test_other_convolutions_stay(kind: tuple[int, int, int]) -> None:
    assert with_merged_groups(convolutions(kind)) is None


def test_weights_that_are_computed_stay() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=8, pads=[1, 1, 1, 1])
    data = model([node], {"x": [1, 32, 6, 6], "w": [32, 4, 3, 3]}, {"y": [1, 32, 6, 6]})
    assert with_merged_groups(data) is None


@pytest.mark.parametrize(
    ("before", "after", "narrow", "quicker"),
    [(1.02, 1.0, 2.0, True), (1.0, 1.0, 1.0, False), (0.5, 1.0, 0.9, False), (0.5, 1.0, 0.4, True)],
)
def test_grouped_convolutions_and_reorderings_decide(
    before: float, after: float, narrow: float, quicker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [{"conv": before / 2, "reordering": before / 2}, {"conv": after}]
    monkeypatch.setattr(onnx_groups, "_concerned", lambda *_: times.pop(0))
    monkeypatch.setattr(onnx_groups, "_narrow", lambda *_: {"conv": narrow, "other": 9.0})
    data = convolutions((32, 32, 8), (32, 32, 1))
    assert is_quicker_merged(data, SessionOptions(), [numbers(1, 32, 6, 6)]) == quicker
    assert times == []


def test_what_is_profiled_is_there_and_nothing_else() -> None:
    data, x = convolutions((32, 32, 8), (32, 32, 1), size=24), numbers(1, 32, 24, 24)
    wide = onnx_groups.with_merged_groups(data)
    assert wide is not None
    options = SessionOptions()
    graphs = [named(optimized(model, options)) for model in (data, wide)]
    narrow, merged_ = (onnx_groups._concerned(graph, options.unoptimized(), [x]) for graph in graphs)
    assert all(seconds > 0 for seconds in (*narrow.values(), *merged_.values()))
    assert 1 <= len(merged_) <= len(narrow) <= 4  # the convolution, and what orders before and after


@needs_compiler
def test_merged_groups_are_timed_as_narrow_ones_too() -> None:
    wide = onnx_groups.with_merged_groups(convolutions((32, 32, 8), (32, 32, 1), size=24))
    assert wide is not None
    options, x = SessionOptions(), numbers(1, 32, 24, 24)
    graph = named(optimized(wide, options))
    seconds = onnx_groups._narrow(graph, options.unoptimized(), [x])
    assert set(onnx_groups._concerned(graph, options.unoptimized(), [x])) <= set(seconds)


def test_without_a_compiler_merged_groups_are_timed_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise CompilerError("there is no C++ compiler")

    caplog.set_level("INFO", logger="ampopt")
    monkeypatch.setattr(onnx_groups, "own_library", missing)
    graph = named(optimized(convolutions((32, 32, 1)), SessionOptions()))
    assert onnx_groups._narrow(graph, SessionOptions().unoptimized(), [numbers(1, 32, 6, 6)]) == {}
    assert "there is no C++ compiler" in caplog.text


def test_without_narrow_groups_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_groups, "_concerned", lambda *_: pytest.fail("measured"))
    assert not is_quicker_merged(convolutions((16, 16, 1)), SessionOptions(), [numbers(1, 16, 6, 6)])
