"""Means and norms of many numbers for ONNX Runtime, which adds one number after another.

Pooling to one pixel is among them because its usual form is slow, and a mean in another dtype because
torch.onnx averages integers without fractions.

Correct because: the mean of means of equally many numbers is the mean of all; the variance is the mean of the
squares of what is left beside any number, less the square of that rest's mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, dtype_of, shape_of
from ampopt.ir.part_forms import mean_of_selected

MOST_AT_ONCE = 256
"""Pixels whose sum is taken at once: the error of a sum of equal numbers is then at most 2e-5."""


def _mean_of_pixels(call: Call, node: fx.Node) -> Any:
    """The mean that a pooling to one pixel is.

    Of an image in channels_last PyTorch's own result is a view of its storage, which ONNX's form gathers
    number by number.
    """
    values = arguments(node)
    is_one = list(values["output_size"]) == [1, 1]
    return _mean(call, values["self"], True) if is_one else None


def _in_asked_dtype(call: Call, node: fx.Node) -> Any:
    """Of what is cast to the dtype that is asked for: torch.onnx averages integers without fractions."""
    values, positional = arguments(node), ("self", "dim", "keepdim")
    source, dtype = values["self"], values["dtype"]
    if dtype in (None, dtype_of(source)):
        return None
    cast = call(aten._to_copy.default, source, dtype=dtype)
    return call(node.target, cast, *(values[name] for name in positional[1:] if name in values))


def _mean_of_all(call: Call, node: fx.Node) -> Any:
    selected = mean_of_selected(call, node)
    return _in_asked_dtype(call, node) if selected is None else selected


def _mean_of_many(call: Call, node: fx.Node) -> Any:
    """The mean of the means of rows, where a mean is of many pixels."""
    if (other := _mean_of_all(call, node)) is not None:
        return other
    values = arguments(node)
    source, rank = values["self"], len(shape_of(node.args[0]))  # type: ignore[arg-type]
    dims = sorted(dim % rank for dim in values["dim"] or ())
    is_of_pixels = rank == 4 and dims == [2, 3] and values["dtype"] is None
    return _mean(call, source, values["keepdim"]) if is_of_pixels and _is_large(source) else None


def _mean(call: Call, source: fx.Node, keepdim: bool) -> Any:
    if not _is_large(source):
        return call(aten.mean.dim, source, [-2, -1], keepdim)
    rows = call(aten.mean.dim, source, [-1], True)
    return call(aten.mean.dim, rows, [-2, -1], keepdim)


def _is_large(source: fx.Node) -> bool:
    """Whether ONNX Runtime's sum of a channel, one number after another, would lose too much.

    Where all numbers are equal, every rounding is in the same direction: with 12,544 of them the error is up
    to 7e-4. A sum of rows has that of a row and of a column.
    """
    *_, height, width = shape_of(source)
    return height * width > MOST_AT_ONCE


def _group_norm(call: Call, node: fx.Node) -> Any:
    """The norm of each group of channels by means of rows, where a group has many numbers; see `_normed`."""
    values = arguments(node)
    groups, channels = values["num_groups"], shape_of(values["input"])[1]
    if not _is_long_norm(node, channels // groups):
        return None
    return _normed(call, values, [groups, channels // groups])


def _instance_norm(call: Call, node: fx.Node) -> Any:
    """`_group_norm`, with each channel for a group."""
    values = arguments(node)
    if not values["use_input_stats"] or not _is_long_norm(node, 1):
        return None
    return _normed(call, values, [shape_of(values["input"])[1], 1])


def _is_long_norm(node: fx.Node, each: int) -> bool:
    """Whether a norm in float32 is of more numbers than one sum may have; `each`: channels of a group."""
    pixels = math.prod(shape_of(arguments(node)["input"])[2:])
    return dtype_of(node) is torch.float32 and each * pixels > MOST_AT_ONCE


def _normed(call: Call, values: Mapping[str, Any], groups: Sequence[int]) -> Any:
    """The norm of a tensor whose channels are `groups`, how many and of how many channels.

    It divides what rounding has made of the mean of nearly equal numbers by their deviation: of an image of 0
    EfficientNet-B0 with group norm had an error of 9e-5 in ONNX Runtime, and has 2e-6 so.
    """
    source = values["input"]
    pixels = shape_of(source)[2:]
    dims = range(2, 3 + len(pixels))
    apart = call(aten.unflatten.int, source, 1, groups)
    centred = call(aten.sub.Tensor, apart, _mean_by_rows(call, apart, dims))
    rest = _mean_by_rows(call, centred, dims)  # of the mean, by rounding
    squares = _mean_by_rows(call, call(aten.mul.Tensor, centred, centred), dims)
    variance = call(aten.sub.Tensor, squares, call(aten.mul.Tensor, rest, rest))
    factor = call(aten.rsqrt.default, call(aten.add.Scalar, variance, values["eps"]))
    weight, bias = (
        None if own is None else call(aten.view.default, own, [1, *groups, *[1] * len(pixels)])
        for own in (values["weight"], values["bias"])
    )
    if weight is not None:
        factor = call(aten.mul.Tensor, factor, weight)
    offset = call(aten.neg.default, call(aten.mul.Tensor, rest, factor))
    if bias is not None:
        offset = call(aten.add.Tensor, offset, bias)
    result = call(aten.add.Tensor, call(aten.mul.Tensor, centred, factor), offset)
    return call(aten.flatten.using_ints, result, 1, 2)


def _mean_by_rows(call: Call, source: Any, dims: Sequence[int]) -> Any:
    """The mean over these dimensions, of the means over the last one; with all dimensions."""
    *others, last = dims
    rows = call(aten.mean.dim, source, [last], True)
    return call(aten.mean.dim, rows, others, True) if others else rows


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.adaptive_avg_pool2d.default: _mean_of_pixels,
    aten.mean.dim: _mean_of_many,
    aten.mean.default: _mean_of_all,
    aten.softmax.int: _in_asked_dtype,
    aten.log_softmax.int: _in_asked_dtype,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
