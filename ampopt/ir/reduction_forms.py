"""Forms of reductions for ONNX, whose exporter needs their dimensions or has no operator for them.

torch.onnx takes no maximum over all dimensions, no total of 8 or 16 bits, no running product, maximum or
logarithm of a sum; ONNX Runtime no maximum of int16, and no place of NaN among integers.

Correct because: all dimensions are those that there are, and a number without any is its own maximum; int32
has the numbers of int16, and integers have no NaN; the low bits of a total are those of its terms' low bits;
a sum of exponentials up to each place is that of the places up to half as many back, and of the half before
them, which `added` adds without overflow, and so is a maximum. What runs has a step for each size, which so
must not vary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, dtype_of, replace_result, shape_of

_SHORT = (torch.bool, torch.uint8, torch.int8, torch.int16)
"""Dtypes in which ONNX adds and multiplies nothing."""

_TOTALS = (
    *(aten.sum.default, aten.sum.dim_IntList, aten.prod.default, aten.prod.dim_int),
    aten.cumsum.default,
)

LONGEST = 256
"""The longest running product, which is one product after another."""


def _extreme(call: Call, node: fx.Node) -> Any:
    """With every dimension by its number, where none is named."""
    values = arguments(node)
    if values["dim"] and shape_of(values["self"]) and dtype_of(values["self"]) is not torch.int16:
        return None
    return _extreme_of(call, node.target, values["self"], values["dim"], values["keepdim"])


def _extreme_of(call: Call, target: Any, source: fx.Node, dims: list[int] | None, keepdim: bool) -> Any:
    rank, dtype = len(shape_of(source)), dtype_of(source)
    if rank == 0:
        return call(aten.clone.default, source)
    wide = call(aten._to_copy.default, source, dtype=torch.int32) if dtype is torch.int16 else source
    found = call(target, wide, dims or list(range(rank)), keepdim)
    return call(aten._to_copy.default, found, dtype=dtype) if wide is not source else found


def _extreme_of_all(call: Call, node: fx.Node) -> Any:
    target = aten.amax.default if node.target is aten.max.default else aten.amin.default
    source = arguments(node)["self"]
    return _extreme_of(call, target, source, None, False) if dtype_of(source) is torch.int16 else None


def _both_extremes(call: Call, node: fx.Node) -> None:
    """The smallest and the largest, each by itself."""
    values = arguments(node)
    dims = None if values["dim"] is None else [values["dim"]]
    for reader in list(node.users):
        target = (aten.amin.default, aten.amax.default)[reader.args[1]]  # type: ignore[index]
        replace_result(reader, _extreme_of(call, target, values["self"], dims, values["keepdim"]))


def _sum_of_numbers(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    if dtype_of(values["self"]).is_floating_point:
        return None
    return call(aten.sum.dim_IntList, values["self"], values["dim"], values["keepdim"], dtype=values["dtype"])


def added(call: Call, a: Any, b: Any, beta: float = 1.0) -> Any:
    """The logarithm, to the base of e to the power of beta, of the sum of the powers of two numbers."""
    largest = call(aten.maximum.default, a, b)
    distance = call(aten.abs.default, call(aten.sub.Tensor, a, b))
    distance = call(aten.masked_fill.Scalar, distance, call(aten.eq.Tensor, a, b), 0.0)  # of two infinities
    return call(
        aten.add.Tensor, largest, call(aten.softplus.default, call(aten.neg.default, distance), beta, 60.0)
    )


def _short_total(call: Call, node: fx.Node) -> Any:
    """The total of 64 bits, of which the low ones are those of 8 or 16; of truths, whether it is not 0."""
    if dtype_of(node) not in _SHORT:
        return None
    values = arguments(node)
    source, dims = values.pop("self"), [values[name] for name in ("dim", "keepdim") if name in values]
    if dtype_of(source).is_floating_point or dtype_of(node) is torch.bool:
        source = call(aten._to_copy.default, source, dtype=dtype_of(node))
    long = call(aten._to_copy.default, source, dtype=torch.int64)
    total = call(node.target, long, *dims, dtype=torch.int64)
    if dtype_of(node) is torch.bool:
        return call(aten.ne.Scalar, total, 0)
    return call(aten._to_copy.default, total, dtype=dtype_of(node))


def _running_product(call: Call, node: fx.Node) -> Any:
    """One product after another, as in eager: a float32 may overflow in any other order."""
    values, dtype = arguments(node), dtype_of(node)
    source, dim, shape = values["self"], values["dim"], shape_of(node)
    size = shape[dim] if shape else 1
    if not 0 < size <= LONGEST or dtype.is_complex:
        return None
    source = call(aten._to_copy.default, source, dtype=dtype)
    if not shape:
        return source
    if not dtype.is_floating_point:
        source = call(aten._to_copy.default, source, dtype=torch.int64)
    total = call(aten.unflatten.int, source, dim, [size])  # refuses another size
    factors = (call(aten.slice.Tensor, total, dim, place, place + 1) for place in range(size))
    products = itertools.accumulate(factors, partial(call, aten.mul.Tensor))
    return call(aten._to_copy.default, call(aten.cat.default, [*products], dim), dtype=dtype)


def _running_log_sum_exp(call: Call, node: fx.Node) -> Any:
    source, dim = (arguments(node)[name] for name in ("self", "dim"))
    if not dtype_of(source).is_floating_point:
        return None
    shape = shape_of(source)
    size = shape[dim] if shape else 1
    if size < 2:
        return call(aten.clone.default, source)
    return _running(partial(added, call), call, source, dim, size)


def _running_extreme(call: Call, node: fx.Node) -> None:
    """The place is that of the last number so far that is the extreme, or NaN."""
    source, dim = (arguments(node)[name] for name in ("self", "dim"))
    shape, dtype = shape_of(source), dtype_of(source)
    if not shape or not shape[dim]:
        return
    wide = source if dtype.is_floating_point else call(aten._to_copy.default, source, dtype=torch.int64)
    extreme = aten.maximum.default if node.target is aten.cummax.default else aten.minimum.default
    values = _running(partial(call, extreme), call, wide, dim, shape[dim])
    is_it = call(aten.eq.Tensor, wide, values)
    if dtype.is_floating_point:
        is_it = call(aten.logical_or.default, is_it, call(aten.isnan.default, wide))
    across = [-1 if each == dim % len(shape) else 1 for each in range(len(shape))]
    places = call(aten.reshape.default, call(aten.arange.default, shape[dim]), across)
    here = call(aten.mul.Tensor, call(aten._to_copy.default, is_it, dtype=torch.int64), places)
    last = _running(partial(call, aten.maximum.default), call, here, dim, shape[dim])
    for reader in list(node.users):
        of_dtype = last if reader.args[1] == 1 else call(aten._to_copy.default, values, dtype=dtype)
        replace_result(reader, of_dtype)


def _running(two: Callable[[Any, Any], Any], call: Call, source: Any, dim: int, size: int) -> Any:
    """What an operator of two numbers, in any grouping, makes of all numbers up to each place."""
    total, step = call(aten.unflatten.int, source, dim, [size]), 1  # refuses another size
    while step < size:
        first, rest, before = (
            call(aten.slice.Tensor, total, dim, start, end)
            for start, end in ((0, step), (step, size), (0, size - step))
        )
        total = call(aten.cat.default, [first, two(rest, before)], dim)
        step *= 2
    return total


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.max.default: _extreme_of_all,
    aten.min.default: _extreme_of_all,
    aten.aminmax.default: _both_extremes,
    aten.nansum.default: _sum_of_numbers,
    **dict.fromkeys(_TOTALS, _short_total),
    aten.cumprod.default: _running_product,
    aten.logcumsumexp.default: _running_log_sum_exp,
    aten.cummax.default: _running_extreme,
    aten.cummin.default: _running_extreme,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
