"""Tells the operators that OpenVINO is known to compute as ONNX means them, by their kinds and dtypes alone.

Where the program that a model was made of is at hand, `passes.openvino` knows more of it and takes more. Only
real numbers in the model's precision are taken, and integers that follow from constants and sizes.
"""

from __future__ import annotations

from typing import Any

_KNOWN = frozenset(
    (
        *("Abs", "Add", "AvgPool", "BatchNormInference", "Broadcast", "Clamp", "Concat", "Constant"),
        *("Convert", "Convolution", "ConvolutionBackpropData", "DepthToSpace", "Divide", "Elu", "Erf"),
        *("Exp", "Gather", "Gelu", "GroupConvolution", "GroupConvolutionBackpropData"),
        *("GroupNormalization", "HSigmoid", "HSwish", "HardSigmoid", "Log", "LogSoftmax", "MVN"),
        *("MatMul", "MaxPool", "Maximum", "Minimum", "Mish", "Multiply", "Negative", "PRelu", "Pad"),
        *("Parameter", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Relu"),
        *("Reshape", "Result", "Selu", "ShuffleChannels", "Sigmoid", "Slice", "SoftPlus", "SoftSign"),
        *("Softmax", "SpaceToDepth", "Split", "Sqrt", "Squeeze", "StridedSlice", "Subtract", "Swish"),
        *("Tanh", "Transpose", "Unsqueeze", "VariadicSplit"),
    )
)
"""The operators of networks for images whose results do not jump."""

_BORDER = ("Parameter", "Result")
_SIZES = ("Constant", "ShapeOf")


def unknown_operator(model: Any, *, half: bool) -> str | None:
    """The first operator of an `openvino.Model` that is not known, by name, kind and dtype; None: all are.

    `half`: the model computes in float16, and not only in float32.
    """
    dtypes, sizes = {"f32", "f16"} if half else {"f32"}, set[str]()
    for op in model.get_ordered_ops():
        kind = op.get_type_name()
        if kind in _SIZES or (kind not in _BORDER and _is_of_sizes(op, sizes)):
            sizes.add(op.get_name())
        elif kind not in _KNOWN or (found := _unknown_dtype(op, dtypes)):
            dtype = "" if kind not in _KNOWN else f" of {found}"
            return f"{op.get_friendly_name()} ({kind}{dtype})"
    return None


def _is_of_sizes(op: Any, sizes: set[str]) -> bool:
    """Whether an operator makes integers of constants and sizes alone, which every call has alike."""
    sources = [value.get_node().get_name() for value in op.input_values()]
    is_whole = not any(each.get_element_type().is_real() for each in op.outputs())
    return is_whole and bool(sources) and sizes.issuperset(sources)


def _unknown_dtype(op: Any, dtypes: set[str]) -> str | None:
    """What is unusual in the tensors that an operator takes from others, and in those that others read."""
    read = [each for each in op.outputs() if each.get_target_inputs() or op.get_type_name() == "Result"]
    for each in (*read, *(op.input_values() if op.get_type_name() == "Convert" else ())):
        shape, dtype = each.get_partial_shape(), each.get_element_type().get_type_name()
        if shape.is_dynamic or 0 in shape.to_shape():
            return f"shape {shape}"
        if dtype not in dtypes:
            return str(dtype)
    return None
