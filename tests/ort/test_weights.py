"""Weights beside others: a name that no tensor has, and only what nothing reads is removed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from ampopt.ort.weights import add_weights, remove_unread  # noqa: E402
from tests.support.onnx_models import convolution, model  # noqa: E402


@pytest.fixture
def graph() -> Any:
    """The graph of `y = relu(c)`, `c = conv(x, w)`."""
    return onnx.load_from_string(convolution()).graph


def names(graph: Any) -> list[str]:
    return [each.name for each in graph.initializer]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_weights_are_added_as_they_are(graph: Any, dtype: type) -> None:
    array: np.ndarray[Any, Any] = np.arange(6).reshape(2, 3).astype(dtype)
    assert add_weights(graph, "v", array) == "v"
    assert names(graph) == ["w", "v"]
    found = onnx.numpy_helper.to_array(graph.initializer[1])
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


@pytest.mark.parametrize("taken", ["w", "x", "c", "y"])
def test_a_name_that_a_weight_an_input_or_a_result_has_grows(graph: Any, taken: str) -> None:
    array = np.zeros(1, np.float32)
    assert add_weights(graph, taken, array) == f"{taken}_"
    assert add_weights(graph, taken, array) == f"{taken}__"
    assert names(graph) == ["w", f"{taken}_", f"{taken}__"]


def test_only_weights_that_are_named_and_that_nothing_reads_are_removed(graph: Any) -> None:
    array = np.zeros(1, np.float32)
    for name in ("unread", "other"):
        add_weights(graph, name, array)
    remove_unread(graph, ["w", "unread", "no such weight"])
    assert names(graph) == ["w", "other"]


def test_a_weight_that_is_an_output_stays() -> None:
    table = np.ones(2, np.float32)
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name="relu")
    data = model([node], {"x": [2]}, {"y": [2], "table": [2]}, {"table": table, "unread": table})
    graph = onnx.load_from_string(data).graph
    remove_unread(graph, names(graph))
    assert names(graph) == ["table"]


def test_what_is_removed_leaves_a_model_that_is_whole() -> None:
    loaded = onnx.load_from_string(convolution())
    conv = loaded.graph.node[0]
    weight = onnx.numpy_helper.to_array(loaded.graph.initializer[0])
    conv.input[1] = add_weights(loaded.graph, "w", 2 * weight)
    remove_unread(loaded.graph, ["w"])
    onnx.checker.check_model(loaded, full_check=True)
    assert names(loaded.graph) == [conv.input[1]] == ["w_"]
