"""Forms of attention for ONNX, whose exporter takes four dimensions, and masks that leave something.

In a boolean mask's form of torch.onnx a row in which nothing is left to attend to is the mean of all values,
and NaN is 0; with a float mask the row is NaN.

Correct because: other numbers of dimensions get PyTorch's own steps, whose softmax is 0 where all scores are
negative infinity; heads that share keys and values get a copy of them each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, dtype_of, is_constant, shape_of


def _attention(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    if values["dropout_p"]:
        return None
    shapes = {name: shape_of(values[name]) for name in ("query", "key", "value")}
    repeated = [name for name in ("key", "value") if _is_shared(values, shapes["query"], shapes[name])]
    for name in repeated:
        values[name] = _for_each_head(call, values[name], shapes["query"][-3])
    del values["enable_gqa"]
    if any(len(shape) != 4 for shape in shapes.values()):
        return _in_steps(call, node, values)
    masked = _masked(call, node, values)
    return call(node.target, **values) if masked is None and repeated else masked


def _is_shared(values: Mapping[str, Any], queries: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether several heads read one of keys or values."""
    return values["enable_gqa"] and queries[-3] != shape[-3]


def _for_each_head(call: Call, source: fx.Node, heads: int) -> Any:
    """Keys or values, each as often as heads read it, one after another."""
    rank, repeats = len(shape_of(source)), heads // shape_of(source)[-3]
    sizes = [*[-1] * (rank - 2), repeats, -1, -1]
    repeated = call(aten.expand.default, call(aten.unsqueeze.default, source, -3), sizes)
    return call(aten.flatten.using_ints, repeated, -4, -3)


def _masked(call: Call, node: fx.Node, values: Mapping[str, Any]) -> Any:
    """Attention that is 0 where the mask leaves nothing to attend to, and NaN where its scores are.

    A constant mask masks the same in every call, so the verification sees it.
    """
    mask, dtype = values["attn_mask"], dtype_of(node)
    if not isinstance(mask, fx.Node) or is_constant(mask):
        return None
    low = torch.finfo(dtype).min / 2  # with a score it is in range, and its exponential is 0
    if dtype_of(mask) is torch.bool:
        is_off = call(aten.logical_not.default, mask)
        bias = call(aten.mul.Scalar, call(aten._to_copy.default, is_off, dtype=dtype), low)
    else:
        is_off = call(aten.eq.Scalar, mask, -math.inf)
        bias = call(aten.masked_fill.Scalar, mask, is_off, low)
    is_on = call(aten.logical_not.default, call(aten.all.dim, is_off, -1, True))
    result = call(node.target, **{**values, "attn_mask": bias})
    return call(aten.mul.Tensor, result, call(aten._to_copy.default, is_on, dtype=dtype))


def _in_steps(call: Call, node: fx.Node, values: Mapping[str, Any]) -> Any:
    query, key, value, mask = (values[name] for name in ("query", "key", "value", "attn_mask"))
    scale = values["scale"]
    scale = shape_of(query)[-1] ** -0.5 if scale is None else scale
    scaled = call(aten.mul.Scalar, query, scale)
    scores = call(aten.matmul.default, scaled, call(aten.transpose.int, key, -2, -1))
    if mask is None and not values["is_causal"]:
        return call(aten.matmul.default, call(aten.softmax.int, scores, -1), value)
    if values["is_causal"]:
        below = call(aten.tril.default, call(aten.ones_like.default, scores))
        scores = call(aten.add.Tensor, scores, _bias(call, call(aten.eq.Scalar, below, 0), scores, node))
    if mask is not None:
        is_truth = dtype_of(mask) is torch.bool
        bias = _bias(call, call(aten.logical_not.default, mask), mask, node) if is_truth else mask
        scores = call(aten.add.Tensor, scores, bias)
    is_none = call(aten.all.dim, call(aten.eq.Scalar, scores, -math.inf), -1, True)
    weights = call(aten.masked_fill.Scalar, call(aten.softmax.int, scores, -1), is_none, 0.0)
    return call(aten.matmul.default, weights, value)


def _bias(call: Call, is_off: fx.Node, like: fx.Node, node: fx.Node) -> Any:
    """Negative infinity where there is nothing to attend to, else 0."""
    zeros = call(aten.zeros_like.default, like, dtype=dtype_of(node))
    return call(aten.masked_fill.Scalar, zeros, is_off, -math.inf)


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
