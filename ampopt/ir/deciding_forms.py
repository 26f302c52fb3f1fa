"""Exact forms of operators that decide: a quotient rounded down, a remainder, the place of a maximum.

torch.onnx divides, rounds the quotient and multiplies back, so that 1 // 0.1 is 10 and 1 % 0.1 is 0, for
PyTorch's 9 and 0.1: the float32 below 0.1 is larger than 0.1. So does inductor. Random inputs seldom are
such multiples, and a grid's are all the time. ONNX's ArgMax compares, which NaN never wins; PyTorch gives the
first NaN's place.

Correct because: ONNX's Mod of floating-point numbers is C's fmod, which is exact, and both forms are
PyTorch's own steps from there; where a row has NaN, the largest of its marks is at its first one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ampopt.ir.graph import arguments, aten, dtype_of, replace_result

Call = Callable[..., Any]
"""Makes the node of a new call from an operator and its arguments."""


def _remainder(call: Call, node: fx.Node) -> Any:
    if (operands := _of_numbers(call, node)) is None:
        return None
    a, b = operands
    rest, is_other = _rest(call, a, b)
    return call(aten.where.self, is_other, call(aten.add.Tensor, rest, b), rest)


def _quotient(call: Call, node: fx.Node) -> Any:
    """Without the remainder the quotient is a whole number, but for rounding.

    torch.onnx takes no number for a dividend, also of integers.
    """
    if (operands := _of_numbers(call, node)) is None:
        number, divisor = node.args[:2]
        if isinstance(number, fx.Node) or dtype_of(node).is_floating_point:
            return None
        return call(node.target, filled_like(call, divisor, number, node), divisor, **node.kwargs)
    a, b = operands
    rest, is_other = _rest(call, a, b)
    whole = call(aten.div.Tensor, call(aten.sub.Tensor, a, rest), b)
    one = call(aten._to_copy.default, is_other, dtype=dtype_of(node))
    whole = call(aten.sub.Tensor, whole, one)
    below = call(aten.floor.default, whole)
    is_above = call(aten.gt.Scalar, call(aten.sub.Tensor, whole, below), 0.5)
    rounded = call(aten.where.self, is_above, call(aten.add.Tensor, below, 1.0), below)
    if not isinstance(b, fx.Node):
        return rounded
    return call(aten.where.self, call(aten.eq.Scalar, b, 0), call(aten.div.Tensor, a, b), rounded)


def _of_numbers(call: Call, node: fx.Node) -> tuple[Any, Any] | None:
    """Both operands of a division rounded down, in the dtype of its result; None for any other."""
    a, b = node.args[:2]
    is_down = node.kwargs.get("rounding_mode", "floor") == "floor"
    if not dtype_of(node).is_floating_point or not is_down or b == 0:
        return None
    b = in_dtype_of(call, b, node)
    if not isinstance(a, fx.Node):
        return filled_like(call, b, a, node), b
    return in_dtype_of(call, a, node), b


def in_dtype_of(call: Call, value: Any, node: fx.Node) -> Any:
    """An operand in the dtype of a node's result; a number stays."""
    is_other = isinstance(value, fx.Node) and dtype_of(value) is not dtype_of(node)
    return call(aten._to_copy.default, value, dtype=dtype_of(node)) if is_other else value


def filled_like(call: Call, other: Any, number: Any, node: fx.Node) -> Any:
    """A number as a tensor like another one, in the dtype of a node's result."""
    return call(aten.full_like.default, other, number, dtype=dtype_of(node))


def _rest(call: Call, a: Any, b: Any) -> tuple[Any, Any]:
    """C's remainder, which has the dividend's sign, and whether that is not the divisor's."""
    if not isinstance(b, fx.Node):
        rest = call(aten.fmod.Scalar, a, b)
        return rest, call(aten.lt.Scalar if b > 0 else aten.gt.Scalar, rest, 0)
    rest = call(aten.fmod.Tensor, a, b)
    signs = call(aten.lt.Scalar, rest, 0), call(aten.lt.Scalar, b, 0)
    is_some = call(aten.ne.Scalar, rest, 0)
    return rest, call(aten.logical_and.default, is_some, call(aten.logical_xor.default, *signs))


def _place(call: Call, node: fx.Node) -> Any:
    return _first_of(call, node.target, *(arguments(node)[name] for name in ("self", "dim", "keepdim")))


def _place_beside(call: Call, node: fx.Node) -> None:
    """The place of a maximum that is given beside it."""
    values, is_max = arguments(node), node.target is aten.max.dim
    target = aten.argmax.default if is_max else aten.argmin.default
    for reader in list(node.users):
        if reader.target is operator.getitem and reader.args[1] == 1:
            found = _first_of(call, target, values["self"], values["dim"], values["keepdim"])
            if found is not None:
                replace_result(reader, found)


def _first_of(call: Call, target: Any, source: fx.Node, dim: int | None, keepdim: bool) -> Any:
    """The place of the largest or smallest, or of the first NaN, in a row or in all."""
    if not dtype_of(source).is_floating_point:
        return None
    is_nan = call(aten.isnan.default, source)
    found = call(aten.any.default, is_nan) if dim is None else call(aten.any.dim, is_nan, dim, True)
    mark = call(aten._to_copy.default, is_nan, dtype=dtype_of(source))
    mark = mark if target is aten.argmax.default else call(aten.neg.default, mark)
    return call(target, call(aten.where.self, found, mark, source), dim, keepdim)


DIVISIONS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Scalar_Tensor: _remainder,
    aten.floor_divide.default: _quotient,
    aten.div.Tensor_mode: _quotient,
    aten.div.Scalar_mode: _quotient,
}
"""Those of divisions, which inductor rounds as torch.onnx does."""

FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    **DIVISIONS,
    aten.argmax.default: _place,
    aten.argmin.default: _place,
    aten.max.dim: _place_beside,
    aten.min.dim: _place_beside,
}
"""For each operator, a function of (call, node) that makes its exact form; None: no change needed."""
