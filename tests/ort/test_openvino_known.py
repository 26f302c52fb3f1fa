"""Operators that OpenVINO is known to compute as ONNX means them: others are named, with their dtypes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ampopt.ort.openvino_session import first_unknown
from ampopt.ort.options import SessionError
from ampopt.ort.session import Array
from tests.support.onnx_models import convolution, sum_and_product

pytest.importorskip("openvino")

FLOAT, HALF, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64
INT8, INT16, INT32, BOOL = TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.BOOL


def model(
    nodes: Sequence[onnx.NodeProto], dtype: int, shape: Sequence[Any], out: int, **constants: Array
) -> bytes:
    """A model from `x` of a dtype and a shape to `y` of another dtype."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", out, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(made.SerializeToString())


def node(kind: str, *inputs: str, y: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs or ["x"], [y], **attributes)


def resizing(height: int, width: int, mode: str = "linear") -> bytes:
    """A model that resizes an image by the coordinates that PyTorch's older exporter writes."""
    made = node("Resize", "x", "", "", "s", mode=mode, coordinate_transformation_mode="pytorch_half_pixel")
    return model([made], FLOAT, [1, 1, 8, 8], FLOAT, s=np.array([1, 1, height, width]))


TENTH, SIZES = np.array(0.1, np.float32), np.array([1, 1, 3, 5])
GRID = np.zeros((1, 2, 2, 2), np.float32)

UNKNOWN: dict[str, tuple[bytes, str]] = {
    "int64": (sum_and_product("int64"), r"\(Parameter of i64\)"),
    "int32": (model([node("Add", "x", "x")], INT32, [3], INT32), r"\(Parameter of i32\)"),
    "int16": (model([node("Add", "x", "x")], INT16, [3], INT16), r"\(Parameter of i16\)"),
    "int8": (model([node("Cast", to=INT8)], FLOAT, [3], INT8), r"\(Convert of i8\)"),
    "float64": (model([node("Cast", to=DOUBLE)], FLOAT, [3], DOUBLE), r"\(Convert of f64\)"),
    "a rounding": (
        model([node("Cast", to=HALF, y="h"), node("Cast", "h", to=FLOAT)], FLOAT, [3], FLOAT),
        r"\(Convert of f16\)",
    ),
    "integers of numbers": (
        model([node("Cast", to=INT64, y="h"), node("Cast", "h", to=FLOAT)], FLOAT, [3], FLOAT),
        r"\(Convert of i64\)",
    ),
    "places": (model([node("ArgMax", axis=0)], FLOAT, [3], INT64), r"\(TopK"),
    "sizes that are returned": (model([node("Shape")], FLOAT, [3], INT64), r"\(Result of i64\)"),
    "truth": (model([node("Cast", to=BOOL)], FLOAT, [3], BOOL), r"\(Convert of boolean\)"),
    "a remainder": (model([node("Mod", "x", "c", fmod=1)], FLOAT, [3], FLOAT, c=TENTH), r"\(Mod\)"),
    "a floor": (
        model([node("Div", "x", "c", y="q"), node("Floor", "q")], FLOAT, [3], FLOAT, c=TENTH),
        r"\(Floor\)",
    ),
    "the nearest pixel": (
        model([node("GridSample", "x", "g", mode="nearest")], FLOAT, [1, 1, 4, 4], FLOAT, g=GRID),
        r"\(GridSample\)",
    ),
    "antialiasing": (
        model(
            [node("Resize", "x", "", "", "s", mode="linear", antialias=1)],
            FLOAT,
            [1, 1, 8, 8],
            FLOAT,
            s=SIZES,
        ),
        r"\(Interpolate\)",
    ),
    "a resizing to one pixel": (resizing(1, 1), r"\(Interpolate\)"),
    "a bicubic resizing to one pixel": (resizing(3, 1, "cubic"), r"\(Interpolate\)"),
    "an empty tensor": (
        model([node("Slice", "x", "a", "a")], FLOAT, [3], FLOAT, a=np.array([1])),
        r"of shape \[0\]\)",
    ),
    "a size that varies": (convolution(batch="n"), r"\(Parameter of shape \[\?,3"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_operator_that_may_be_computed_otherwise_is_named(name: str) -> None:
    made, operator = UNKNOWN[name]
    found = first_unknown(made, half=False)
    assert found is not None
    assert re.search(operator, found)


def test_networks_of_known_operators_are_taken() -> None:
    assert first_unknown(convolution(), half=False) is None
    assert first_unknown(sum_and_product(), half=False) is None
    assert first_unknown(resizing(3, 5), half=False) is None
    by_size = [
        node("Shape", y="s"),
        node("Concat", "s", "one", y="t", axis=0),
        node("Reshape", "x", "t"),
    ]
    assert first_unknown(model(by_size, FLOAT, [2, 3], FLOAT, one=np.array([1])), half=False) is None


def test_float16_is_taken_where_the_model_computes_in_it() -> None:
    made, _ = UNKNOWN["a rounding"]
    assert first_unknown(made, half=True) is None
    assert first_unknown(sum_and_product("float16"), half=True) is None


def test_what_is_no_model_is_not_read() -> None:
    with pytest.raises(SessionError, match="OpenVINO does not read the model"):
        first_unknown(b"no model", half=False)
