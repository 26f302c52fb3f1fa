"""Tells the operators that OpenVINO is known to compute as ONNX means them, by their kinds and dtypes alone.

Where the program that a model was made of is at hand, `passes.openvino` knows more of it and takes more. Only
real numbers in the model's precision are taken, and integers that follow from constants and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KNOWN = frozenset(
    (
        *("Abs", "Add", "Atan", "AvgPool", "BatchNormInference", "Broadcast", "Clamp", "Concat", "Constant"),
        *("Convert", "Convolution", "ConvolutionBackpropData", "Cos", "CumSum", "DepthToSpace", "Divide"),
        *("Einsum", "Elu", "Erf", "Exp", "GRUSequence", "Gather", "Gelu", "GroupConvolution"),
        *("GroupConvolutionBackpropData", "GroupNormalization", "HSigmoid", "HSwish", "HardSigmoid"),
        *("Interpolate", "LSTMSequence", "Log", "LogSoftmax", "MVN", "MatMul", "MaxPool", "Maximum"),
        *("Minimum", "Mish", "Multiply", "Negative", "PRelu", "Pad", "Parameter", "Power", "ReduceL1"),
        *("ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Relu"),
        *("Reshape", "Result", "Selu", "ShuffleChannels", "Sigmoid", "Sin", "Slice", "SoftPlus"),
        *("SoftSign", "Softmax", "SpaceToDepth", "Split", "Sqrt", "Squeeze", "StridedSlice", "Subtract"),
        *("Swish", "Tanh", "Tile", "Transpose", "Unsqueeze", "VariadicSplit"),
    )
)
"""The operators of networks for images and sequences whose results do not jump."""

_WEIGHTED = ("linear_onnx", "cubic")
"""Modes of `Interpolate` that weight pixels."""

_COORDINATES = ("half_pixel", "align_corners", "pytorch_half_pixel")
"""Their coordinates; the last ones are wrong where a dimension becomes 1 (measured with 2026.4)."""

_LARGEST_REPEAT = 40
"""How often the nearest pixel may be repeated: from 41 on PyTorch's rounded quotients take the one before."""

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
        elif kind not in _KNOWN:
            return f"{op.get_friendly_name()} ({kind})"
        elif found := _unknown_dtype(op, dtypes):
            return f"{op.get_friendly_name()} ({kind} of {found})"
        elif kind in _KNOWN_IF and not _KNOWN_IF[kind](op):
            return f"{op.get_friendly_name()} ({kind})"
    return None


def _is_known_resizing(op: Any) -> bool:
    """Whether pixels are weighted without antialiasing, or each is repeated, which rounds no coordinate."""
    given = op.get_attributes()
    if given["antialias"] or any(given["pads_begin"]) or any(given["pads_end"]):
        return False
    before, after = (list(port.get_partial_shape().to_shape()) for port in (op.input(0), op.output(0)))
    pairs = list(zip(before, after, strict=True))
    mode, coordinates = given["mode"], given["coordinate_transformation_mode"]
    if mode == "nearest":
        is_floor = (coordinates, given["nearest_mode"]) == ("asymmetric", "floor")
        return is_floor and all(new % old == 0 and new <= _LARGEST_REPEAT * old for old, new in pairs)
    if coordinates == "pytorch_half_pixel" and any(new == 1 != old for old, new in pairs):
        return False
    return mode in _WEIGHTED and coordinates in _COORDINATES


def _is_known_pooling(op: Any) -> bool:
    """Whether no average counts pixels beyond a padding, and no window of maxima begins beyond the image."""
    given = op.get_attributes()
    if given["rounding_type"] == "floor":
        return True
    if op.get_type_name() == "AvgPool":
        return given["exclude-pad"] or not any((*given["pads_begin"], *given["pads_end"]))
    before, after = (port.get_partial_shape().to_shape() for port in (op.input(0), op.output(0)))
    sizes = zip(list(before)[2:], list(after)[2:], given["strides"], given["pads_begin"], strict=True)
    return all((windows - 1) * stride < size + pad for size, windows, stride, pad in sizes)


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


_KNOWN_IF: dict[str, Callable[[Any], bool]] = {
    "Interpolate": _is_known_resizing,
    "AvgPool": _is_known_pooling,
    "MaxPool": _is_known_pooling,
}
"""Of these operators some are known, and others are not."""
