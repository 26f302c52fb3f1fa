"""Forms of poolings, scattered means and losses for ONNX, whose exporter has them wrong.

torch.onnx leaves the divisor of an average pooling out, and that of a scattered mean; it takes sigmoids of
the logits of a loss, which are 0 and 1 where the logits are large. ONNX Runtime's max pooling begins with the
lowest finite number, which it gives for a window of negative infinities.

Correct because: a window's sum is its mean over all its pixels, also those of the padding, times their
number; a mean is a sum by a count; log(sigmoid(x)) is -softplus(-x). The lowest finite number is the largest
of a window whose numbers are all negative infinity, or that number itself, which no model computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import CONVOLUTIONS, arguments, aten, dtype_of, shape_of

_WITHOUT_INFINITY: frozenset[Any] = frozenset(
    {
        *CONVOLUTIONS,
        *(aten.batch_norm.default, aten.linear.default, aten.relu.default, aten.relu6.default),
        *(aten.hardtanh.default, aten.sigmoid.default, aten.silu.default, aten.hardswish.default),
        *(aten.gelu.default, aten.tanh.default, aten.elu.default),
    }
)
"""Operators that make no negative infinity of numbers but by overflow."""

_THROUGH = (aten.max_pool2d.default, aten.cat.default, aten.avg_pool2d.default)
"""Operators that make none where their inputs have none."""


def _with_divisor(call: Call, node: fx.Node) -> Any:
    """The mean over all pixels of a window and its padding, times their number, by the divisor."""
    values = arguments(node)
    if (divisor := values["divisor_override"]) is None:
        return None
    source, rank = values["self"], 2 if node.target is aten.avg_pool2d.default else 3
    kernel, stride, padding = (
        _of_rank(each, rank) for each in (values["kernel_size"], values["stride"], values["padding"])
    )
    stride = stride or kernel
    sizes = zip(shape_of(source)[-rank:], shape_of(node)[-rank:], kernel, stride, padding, strict=True)
    ends = [max((out - 1) * s + k - size - p, 0) for size, out, k, s, p in sizes]  # also of `ceil_mode`
    pads = [each for pair in zip(padding[::-1], ends[::-1], strict=True) for each in pair]
    padded = call(aten.constant_pad_nd.default, source, pads, 0.0) if any(pads) else source
    mean = call(node.target, padded, kernel, stride)
    return call(aten.mul.Tensor, mean, math.prod(kernel) / divisor)


def _of_rank(sizes: Any, rank: int) -> list[int]:
    return list(sizes) * rank if len(sizes) == 1 else list(sizes)


def _lowest_of_infinities(call: Call, node: fx.Node) -> Any:
    """Negative infinity for the lowest finite number, where a window may be full of it."""
    dtype = dtype_of(node)
    if not dtype.is_floating_point or _is_finite(node.args[0]):
        return None
    found = call(node.target, *node.args, **node.kwargs)
    is_lowest = call(aten.eq.Scalar, found, torch.finfo(dtype).min)
    return call(aten.masked_fill.Scalar, found, is_lowest, -math.inf)


def _is_finite(value: Any) -> bool:
    """Whether these are numbers that an operator has computed which makes no infinity."""
    while isinstance(value, fx.Node) and value.target in _THROUGH:
        inputs = value.all_input_nodes
        if len(inputs) > 1:
            return all(_is_finite(each) for each in inputs)
        value = inputs[0]
    return isinstance(value, fx.Node) and value.target in _WITHOUT_INFINITY


def _loss_of_logits(call: Call, node: fx.Node) -> Any:
    """(1 - y) x + w softplus(-x), with w = 1 + (p - 1) y for the weight p of what is true."""
    values = arguments(node)
    x, y, p = values["self"], values["target"], values["pos_weight"]
    left = call(aten.mul.Tensor, call(aten.add.Tensor, call(aten.neg.default, y), 1.0), x)
    right = call(aten.softplus.default, call(aten.neg.default, x))
    if p is not None:
        more = call(aten.mul.Tensor, call(aten.sub.Tensor, p, 1.0), y)
        right = call(aten.mul.Tensor, call(aten.add.Tensor, more, 1.0), right)
    loss = call(aten.add.Tensor, left, right)
    if values["weight"] is not None:
        loss = call(aten.mul.Tensor, loss, values["weight"])
    reduced = {1: aten.mean.default, 2: aten.sum.default}.get(values["reduction"])
    return loss if reduced is None else call(reduced, loss)


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.avg_pool2d.default: _with_divisor,
    aten.avg_pool3d.default: _with_divisor,
    aten.max_pool1d.default: _lowest_of_infinities,
    aten.max_pool2d.default: _lowest_of_infinities,
    aten.max_pool3d.default: _lowest_of_infinities,
    aten.binary_cross_entropy_with_logits.default: _loss_of_logits,
}
"""For each operator, a function of (call, node) that makes its right form; None: no change needed."""
