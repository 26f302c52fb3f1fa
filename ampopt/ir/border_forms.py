"""Forms of operators for signs of zero, infinities, NaN, and places far outside of an image.

Correct because: an angle is its part of a quadrant, moved by the signs of both numbers, where -0 is the one
whose reciprocal is negative; a sample at a place beyond `FAR` is what it is at `FAR`, 0 or a border's pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ampopt.ir.deciding_forms import Call, in_dtype_of
from ampopt.ir.graph import arguments, aten, dtype_of

FAR = 10.0
"""A place from which no sample has a pixel of an image, from -1 to 1, but those of its border."""


def ratio_of(call: Call, small: fx.Node, large: fx.Node) -> Any:
    """What a number that is not negative is of one that is no smaller: 0 of 0, and 1 of two infinities."""
    divisor = call(aten.masked_fill.Scalar, large, call(aten.eq.Scalar, large, 0), 1.0)
    ratio = call(aten.div.Tensor, small, divisor)
    return call(aten.masked_fill.Scalar, ratio, call(aten.eq.Scalar, small, math.inf), 1.0)


def with_nan_of(call: Call, result: fx.Node, *values: Any) -> Any:
    """A result plus 0, or plus what NaN makes of it."""
    for value in values:
        bounded = call(aten.tanh.default, value)  # of an infinity, 0 times would be NaN
        result = call(aten.add.Tensor, result, call(aten.mul.Tensor, bounded, 0.0))
    return result


def _atan2(call: Call, node: fx.Node) -> Any:
    """ONNX divides y by x: it has -π for (0, -1), π/2 of the wrong sign for -0, and 0 for infinities."""
    return _angle_of(call, *(in_dtype_of(call, value, node) for value in node.args[:2]))


def _angle(call: Call, node: fx.Node) -> Any:
    """The angle of a complex number, or 0, π or NaN of a real one."""
    source: Any = node.args[0]
    if dtype_of(source).is_complex:
        parts = call(aten.view_as_real.default, source)
        return _angle_of(call, *(call(aten.select.int, parts, -1, part) for part in (1, 0)))
    if not dtype_of(source).is_floating_point:
        return None
    is_behind = call(aten._to_copy.default, call(aten.lt.Scalar, source, 0), dtype=dtype_of(node))
    return with_nan_of(call, call(aten.mul.Tensor, is_behind, math.pi), source)


def _angle_of(call: Call, y: Any, x: Any) -> Any:
    """The angle in the first quadrant's half below the diagonal, moved to where the signs say; NaN stays."""
    high, wide = (call(aten.abs.default, value) for value in (y, x))
    large, small = call(aten.maximum.default, high, wide), call(aten.minimum.default, high, wide)
    angle = call(aten.atan.default, ratio_of(call, small, large))
    is_steep = call(aten.gt.Tensor, high, wide)
    angle = call(aten.where.self, is_steep, call(aten.rsub.Scalar, angle, math.pi / 2), angle)
    angle = call(aten.where.self, _sign(call, x), call(aten.rsub.Scalar, angle, math.pi), angle)
    angle = call(aten.where.self, _sign(call, y), call(aten.neg.default, angle), angle)
    return with_nan_of(call, angle, y, x)


def _sign(call: Call, value: fx.Node) -> Any:
    """Whether a number is negative, or -0."""
    negative = (call(aten.lt.Scalar, v, 0) for v in (value, call(aten.reciprocal.default, value)))
    return call(aten.logical_or.default, *negative)


def _signbit(call: Call, node: fx.Node) -> Any:
    """ONNX's form compares with 0, which -0 is not below."""
    source: Any = node.args[0]
    return _sign(call, source) if dtype_of(source).is_floating_point else None


def _with_sign(call: Call, node: fx.Node) -> Any:
    """The size of the first with the sign of the second, also of -0, which ONNX Runtime's Where loses."""
    size: Any = node.args[0]
    other: Any = node.args[1]
    if not dtype_of(node).is_floating_point or dtype_of(size) is not dtype_of(node):
        return None
    absolute = call(aten.abs.default, size)
    if not isinstance(other, fx.Node):
        return call(aten.neg.default, absolute) if math.copysign(1.0, other) < 0 else absolute
    if not dtype_of(other).is_floating_point:
        return None
    ones = call(aten.ones_like.default, call(aten.add.Tensor, absolute, other), dtype=dtype_of(node))
    sign = call(aten.masked_fill.Scalar, ones, _sign(call, other), -1.0)
    return call(aten.mul.Tensor, absolute, sign)


def _without_nan(call: Call, node: fx.Node) -> Any:
    """The other number, where one is NaN."""
    one, other = node.args[:2]
    if not dtype_of(node).is_floating_point or dtype_of(one) is not dtype_of(other):  # type: ignore[arg-type]
        return None
    larger = aten.maximum.default if node.target is aten.fmax.default else aten.minimum.default
    found = call(aten.where.self, call(aten.isnan.default, other), one, call(larger, one, other))
    return call(aten.where.self, call(aten.isnan.default, one), other, found)


def _heaviside(call: Call, node: fx.Node) -> Any:
    """1 above 0, the value at 0, and else 0, also of NaN."""
    source, at_zero = node.args[:2]
    above = call(aten._to_copy.default, call(aten.gt.Scalar, source, 0), dtype=dtype_of(node))
    return call(aten.where.self, call(aten.eq.Scalar, source, 0), at_zero, above)


def _sampled(call: Call, node: fx.Node) -> Any:
    """The samples, at places that an integer holds.

    Of a place that is not finite they are plus 0 or NaN where PyTorch has NaN, and ONNX Runtime has pixels.
    The mode is 0 for bilinear, 1 for nearest, 2 for bicubic; the padding 0 for zeros, 1 for the border, 2 for
    reflection. A bilinear sample with padding has pixels in PyTorch, too.
    """
    values = arguments(node)
    mode, padding, place = values["interpolation_mode"], values["padding_mode"], values["grid"]
    is_lost = mode == 2 or (mode == 0 and padding == 0)
    if padding == 2 and not is_lost:
        return None
    if padding != 2:
        place = call(aten.hardtanh.default, place, -FAR, FAR)
    if padding == 0 and mode == 1:
        place = call(aten.masked_fill.Scalar, place, call(aten.isnan.default, place), FAR)
    samples = call(node.target, **{**values, "grid": place})
    if not is_lost:
        return samples
    lost = call(aten.sum.dim_IntList, call(aten.mul.Tensor, values["grid"], 0.0), [-1])
    return call(aten.add.Tensor, samples, call(aten.unsqueeze.default, lost, 1))


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.atan2.default: _atan2,
    aten.angle.default: _angle,
    aten.signbit.default: _signbit,
    aten.heaviside.default: _heaviside,
    aten.copysign.Tensor: _with_sign,
    aten.copysign.Scalar: _with_sign,
    aten.fmax.default: _without_nan,
    aten.fmin.default: _without_nan,
    aten.grid_sampler.default: _sampled,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
