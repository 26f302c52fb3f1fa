"""Small ONNX models and bundles, made without PyTorch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import safetensors.numpy
from onnx import TensorProto, helper, numpy_helper

from ampopt.bundle.files import write_bundle
from ampopt.ort.session import Array, OnnxRunner, SessionOptions

ELEMENTS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[Any]],
    outputs: Mapping[str, Sequence[Any]],
    constants: Mapping[str, Array] | None = None,
    dtype: str = "float32",
) -> bytes:
    """A serialized model whose inputs and outputs all have one dtype."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, ELEMENTS[dtype], shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, ELEMENTS[dtype], shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return bytes(made.SerializeToString())


def convolution(channels: int = 4, size: int = 8, batch: int | str = 1) -> bytes:
    """`y = relu(conv(x))` with x of shape [batch, 3, size, size]."""
    weight = np.random.default_rng(0).standard_normal((channels, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["y"], name="relu"),
    ]
    return model(nodes, {"x": [batch, 3, size, size]}, {"y": [batch, channels, size, size]}, {"w": weight})


def sum_and_product(dtype: str = "float32") -> bytes:
    """`sum = a + b`, `product = a * b`, all of shape [2, 3]."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"], name="add"),
        helper.make_node("Mul", ["a", "b"], ["product"], name="mul"),
    ]
    return model(nodes, {"a": [2, 3], "b": [2, 3]}, {"sum": [2, 3], "product": [2, 3]}, dtype=dtype)


def image(size: int = 8, seed: int = 1) -> Array:
    """A random float32 image of shape [1, 3, size, size]."""
    return np.random.default_rng(seed).standard_normal((1, 3, size, size)).astype(np.float32)


def expected(x: Array) -> Array:
    """What `convolution` gives for an image."""
    return OnnxRunner(convolution(), SessionOptions())(x)[0]


def one_output(path: Path, **fields: Any) -> Path:
    """A bundle of `convolution`."""
    return save_bundle(path, convolution(), {"x": image()}, {"y": expected(image())}, **fields)


def save_bundle(
    path: Path,
    onnx_model: bytes,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    *,
    session: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    expected: Mapping[str, float] | None = None,
    **fields: Any,
) -> Path:
    """A bundle of `onnx_model` with these self-test tensors; `fields` replace those of the manifest.

    `expected` is the latency that the manifest expects of ONNX Runtime, 1 s by default.
    """
    tensors = {f"input.{name}": value for name, value in inputs.items()}
    tensors |= {f"output.{name}": value for name, value in outputs.items()}
    if session is None:
        session = {**SessionOptions().to_dict(), "onnxruntime": onnxruntime.__version__}
    latency = {"p50_ms": 1000.0, "p99_ms": 1000.0} | dict(expected or {})
    manifest = {
        "ampopt": "0.1.0",
        "created": "2026-11-21T09:00:00Z",
        "model": {"name": "Small", "sha256": hashlib.sha256(onnx_model).hexdigest()},
        "lane": {"name": "fp32", "dtype": "float32"},
        "inputs": [_tensor(name, value) for name, value in inputs.items()],
        "outputs": [_tensor(name, value) for name, value in outputs.items()],
        "tolerance": 1e-3,
        "latency": {"p50_ms": 1000.0, "p99_ms": 1000.0, "device": "a CPU"},
        "fingerprint": {},
        "onnx": {"precision": "fp32", "opset": 18, "session": dict(session), "latency": latency},
        "call": {},
        **fields,
    }
    contents = {"model.onnx": onnx_model, "self_test.safetensors": safetensors.numpy.save(tensors)}
    write_bundle(path, manifest, {**contents, **(files or {})})
    return path


def _tensor(name: str, value: Array) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "layout": "contiguous",
    }
