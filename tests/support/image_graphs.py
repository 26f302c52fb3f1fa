"""ONNX graphs of convolutions on images, built operator by operator."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx


class Graph:
    """An ONNX graph under construction, on images of one size."""

    def __init__(self, batch: int = 1, size: tuple[int, int] = (5, 6), seed: int = 0) -> None:
        self.batch, self.size, self.rng = batch, size, np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, array: Any) -> str:
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(array), f"c{len(self.constants)}"))
        return str(self.constants[-1].name)

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"t{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(onnx.helper.make_node(op, inputs, names, **attributes))
        return names[0]

    def conv(self, x: str, inside: int, outside: int, kernel: int = 1, group: int = 1) -> str:
        shape = (outside, inside // group, kernel, kernel)
        weight = self.rng.standard_normal(shape).astype(np.float32) / np.sqrt(np.prod(shape[1:]))
        bias = self.rng.standard_normal(outside).astype(np.float32)
        names = self.constant(weight.astype(np.float32)), self.constant(bias)
        return self.add("Conv", x, *names, kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4, group=group)

    def mean(self, x: str) -> str:
        return self.add("ReduceMean", x, self.constant(np.array([2, 3])), keepdims=1)

    def squeeze(self, x: str, channels: int, inner: int = 8, *, by_rows: bool = False) -> str:
        """Squeeze and excite; `by_rows`: the mean is that of the means of rows."""
        rows = self.add("ReduceMean", x, self.constant(np.array([-1])), keepdims=1) if by_rows else x
        factors = self.add("Relu", self.conv(self.mean(rows), channels, inner))
        return self.add("Mul", self.add("Sigmoid", self.conv(factors, inner, channels)), x)

    def activated(self, x: str, kind: int) -> str:
        """One of the activations that our operators fuse, by a number from 1 to 3; nothing for 0."""
        if kind == 1:
            return self.add("Relu", x)
        if kind == 2:
            return self.add("LeakyRelu", x, alpha=0.2)
        if kind == 3:
            return self.add("Clip", x, self.constant(np.float32(-0.5)), self.constant(np.float32(0.7)))
        return x

    def plain(self, x: str) -> str:
        """An operator that needs the plain layout."""
        return self.add("Softmax", x, axis=1)

    def model(self, channels: int, outputs: list[str]) -> bytes:
        make = onnx.helper.make_tensor_value_info
        inputs = [make("x", onnx.TensorProto.FLOAT, [self.batch, channels, *self.size])]
        results = [make(name, onnx.TensorProto.FLOAT, None) for name in outputs]
        graph = onnx.helper.make_graph(self.nodes, "g", inputs, results, self.constants)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
        data: bytes = onnx.shape_inference.infer_shapes(model).SerializeToString()
        return data


def operators(model: bytes) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load_from_string(model).graph.node)
