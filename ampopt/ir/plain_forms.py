"""Forms for ONNX of what torch.onnx writes as it stands, although ONNX's operator is narrower than PyTorch's.

A copy is not broadcast there, nothing chooses between booleans, two tensors of them have no sum, integers no
ReLU, bytes no negative and no square, a power no boolean exponent, and a shift by a tensor no form by its
operator's name. ONNX Runtime's Tanh may be above 1 by a rounding, of which an arc sine, or the root of 1 -
tanh(x)², is NaN.

Correct because: a copy is the source wherever that is chosen; a choice of booleans is true where the chosen
one is, and one of 8 or 16 bits is the same in 32; a sum of booleans is true where one of them is; of integers
ReLU is the larger of 0 and the number; bytes wrap in either way of writing; no tanh is above 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call, filled_like, in_dtype_of
from ampopt.ir.graph import arguments, aten, dtype_of, shape_of
from ampopt.ir.loss_forms import leads_to

_NOT_ABOVE_ONE = {
    *(aten.asin.default, aten.acos.default, aten.atanh.default, aten.sqrt.default, aten.rsqrt.default),
    *(aten.log.default, aten.log1p.default),
}

MOST_FACTORS = 4

_NOT_CHOSEN = (torch.bool, torch.int8, torch.int16)
"""Dtypes of which ONNX Runtime's Where is not."""


def _copy(call: Call, node: fx.Node) -> Any:
    values, dtype = arguments(node), dtype_of(node)
    given, is_whole = values["src"], shape_of(values["src"]) == shape_of(node)
    if is_whole and dtype_of(given) is dtype:
        return None
    source = given if dtype_of(given) is dtype else call(aten._to_copy.default, given, dtype=dtype)
    if is_whole:
        return source
    always = call(aten.ones_like.default, given, dtype=torch.bool)
    return call(aten.where.self, always, source, values["self"])


def _choice(call: Call, node: fx.Node) -> Any:
    if dtype_of(node) not in _NOT_CHOSEN:
        return None
    condition, *parts = (arguments(node)[name] for name in ("condition", "self", "other"))
    for place, part in enumerate(parts):
        is_number = not isinstance(part, fx.Node)
        parts[place] = (
            filled_like(call, condition, part, node) if is_number else in_dtype_of(call, part, node)
        )
    return chosen(call, dtype_of(node), condition, *parts)


def chosen(call: Call, dtype: torch.dtype, condition: Any, one: Any, other: Any) -> Any:
    """Numbers of one of two tensors of a dtype, as a condition says."""
    if dtype is torch.bool:
        is_first = call(aten.logical_and.default, condition, one)
        is_second = call(aten.logical_and.default, call(aten.logical_not.default, condition), other)
        return call(aten.logical_or.default, is_first, is_second)
    if dtype not in _NOT_CHOSEN:
        return call(aten.where.self, condition, one, other)
    wide = [call(aten._to_copy.default, part, dtype=torch.int32) for part in (one, other)]
    return call(aten._to_copy.default, call(aten.where.self, condition, *wide), dtype=dtype)


def _sum(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    parts = [values[name] for name in ("self", "other")]
    are_booleans = all(isinstance(part, fx.Node) and dtype_of(part) is torch.bool for part in parts)
    if not are_booleans or values["alpha"] != 1:
        return None
    return call(aten.logical_or.default, *parts)


def _relu(call: Call, node: fx.Node) -> Any:
    return None if dtype_of(node).is_floating_point else call(aten.clamp_min.default, node.args[0], 0)


def _negative(call: Call, node: fx.Node) -> Any:
    return call(aten.rsub.Scalar, node.args[0], 0) if dtype_of(node) is torch.uint8 else None


def _power(call: Call, node: fx.Node) -> Any:
    """Of bytes, by a small exponent."""
    source, times = node.args[0], arguments(node).get("exponent", 2)
    if dtype_of(node) is not torch.uint8 or times not in range(1, MOST_FACTORS + 1):
        return None
    product = call(aten.clone.default, source)
    for _ in range(times - 1):
        product = call(aten.mul.Tensor, product, source)
    return product


def _conjugate(call: Call, node: fx.Node) -> Any:
    source = node.args[0]
    if not dtype_of(node).is_complex:
        return None
    imaginary = call(aten.neg.default, call(aten.imag.default, source))
    return call(aten.complex.default, call(aten.real.default, source), imaginary)


def _power_of_a_boolean(call: Call, node: fx.Node) -> Any:
    base, exponent = (arguments(node)[name] for name in ("self", "exponent"))
    if dtype_of(exponent) is not torch.bool or dtype_of(base) is torch.bool:
        return None
    return call(node.target, base, call(aten._to_copy.default, exponent, dtype=dtype_of(base)))


def _mean_slope(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    if values["training"]:
        return None
    return call(aten.leaky_relu.default, values["self"], (values["lower"] + values["upper"]) / 2)


def _bounded_tanh(call: Call, node: fx.Node) -> Any:
    """A tanh that is itself wanted elsewhere is bounded there, too."""
    if not leads_to(node, _NOT_ABOVE_ONE):
        return None
    return call(aten.hardtanh.default, call(aten.tanh.default, node.args[0]), -1.0, 1.0)


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.copy.default: _copy,
    **dict.fromkeys(
        (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar), _choice
    ),
    aten.add.Tensor: _sum,
    aten.relu.default: _relu,
    aten.neg.default: _negative,
    aten.square.default: _power,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power_of_a_boolean,
    aten.rrelu.default: _mean_slope,
    aten.tanh.default: _bounded_tanh,
    aten._conj.default: _conjugate,
    aten.conj.default: _conjugate,
    aten.__lshift__.Tensor: lambda call, node: call(aten.bitwise_left_shift.Tensor, *node.args),
    aten.__rshift__.Tensor: lambda call, node: call(aten.bitwise_right_shift.Tensor, *node.args),
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
