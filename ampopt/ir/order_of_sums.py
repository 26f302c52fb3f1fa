"""How far another order of its terms may change what an operator sums up.

Every engine has an order of its own, and eager is no yardstick where it is lucky: a mean of numbers around 0,
a difference of two means, or a sum of equal terms shows another order a hundred times as much as rounding the
terms does. It is made of the roundings of partial sums, in float32 or float64, of the k terms that are not 0:

- Where terms cancel, partial sums are larger than the sum. Of terms of mean 0 and deviation d, that of i of
  them is about d sqrt(i), and the roundings of all have a standard deviation of 0.4 roundings of d k: one of
  the root mean square times k is counted.
- Of terms of one sign the partial sums grow as the sum does. ONNX Runtime's mean of up to 230,400 numbers had
  errors of up to sqrt(k) / 13 roundings of it on a processor with AVX-512, and narrower ones have as many
  times more: sqrt(k) / 8 are counted, of which verification takes a multiple.
- Of equal terms every partial sum may round to the same side: k / 2 roundings of the sum for one that is made
  term by term, and k / 32 in the 16 lanes of a processor. That is counted where few terms differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

FEW = 1 / 8
"""Terms repeat themselves where at most this share of them differ in 14 bits."""

MOST_ASKED = 2**16
"""The most terms of which that is found out: to sort millions takes seconds."""

_MEANS = {aten.mean.default, aten.mean.dim}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default, *_MEANS}
_SPREADS = {aten.var.correction, aten.std.correction}
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.dot.default, aten.mv.default}
_DISTANCES = {1: aten.mean.default, 2: aten.sum.default}
"""What `mse_loss` makes of squares, by its `reduction`."""
_KNOWN = _SUMS | _SPREADS | _PRODUCTS | {aten.addmm.default, aten.mse_loss.default}


def uncertainty(
    func: Any, result: Any, args: Any, kwargs: Mapping[str, Any], *, repeats: bool
) -> Tensor | None:
    """The most that an operator's result may change, element by element in float64; None if it is no sum.

    `repeats`: count that terms which repeat themselves may all round to the same side, too.
    """
    if func not in _KNOWN or not result.is_floating_point():
        return None
    tensors = [each for each in args if isinstance(each, Tensor)]
    if any(each.layout is not torch.strided or each.is_nested or each.is_complex() for each in tensors):
        return None
    is_double = any(each.dtype is torch.float64 for each in (result, *tensors))
    rounding = torch.finfo(torch.float64 if is_double else torch.float32).eps / 2
    wide = [each.detach().double() if isinstance(each, Tensor) else each for each in args]
    options = {name: value for name, value in kwargs.items() if name != "dtype"}
    found = _Order(rounding, repeats).change(func, result.double(), wide, options)
    return found.nan_to_num(0.0, 0.0, 0.0)  # NaN and infinities stay


@dataclasses.dataclass(frozen=True)
class _Order:
    """Changes by another order, where partial sums have a `rounding`; see `uncertainty`."""

    rounding: float
    repeats: bool

    def change(self, func: Any, result: Tensor, args: list[Any], options: dict[str, Any]) -> Tensor:
        """That of an operator's result, from it and its arguments in float64."""
        if func in _SUMS:
            return self._sum(func, *args, **options)
        if func in _SPREADS:
            squares = self._variance(*args, **options).reshape(result.shape)
            of_root: Tensor = (result.square() + squares).sqrt() - result
            return squares if func is aten.var.correction else of_root
        if func in _PRODUCTS:
            return self._product(func, *args)
        if func is aten.addmm.default:
            return self._product(aten.mm.default, *args[1:]) * abs(float(options.get("alpha", 1)))
        total = _DISTANCES.get(args[2] if len(args) > 2 else options.get("reduction", 1))
        squares = (args[0] - args[1]).square()
        return torch.zeros_like(result) if total is None else self._sum(total, squares)

    def _sum(self, func: Any, terms: Tensor, *args: Any, **options: Any) -> Tensor:
        each = (terms.square(), (terms != 0).double(), terms)
        squares, share, total = (func(one, *args, **options) for one in each)
        count = share * (terms.numel() / max(share.numel(), 1)) if func in _MEANS else share
        change = self._change(squares * share, total, count)
        if self.repeats and _repeat(terms):
            change += func(terms.abs(), *args, **options) * count / 32 * self.rounding
        return change

    def _variance(self, terms: Tensor, dim: Any = None, **_: Any) -> Tensor:
        """That of the mean of the squares around the mean, and the square of that of the mean."""
        dims = list(range(terms.dim())) if dim is None else dim
        mean, of_mean = terms.mean(dims, keepdim=True), self._sum(aten.mean.dim, terms, dims, True)
        return self._sum(aten.mean.dim, (terms - mean).square(), dims, True) + of_mean.square()

    def _product(self, func: Any, one: Tensor, other: Tensor) -> Tensor:
        count = torch.full((), one.shape[-1], dtype=torch.float64, device=one.device)
        return self._change(func(one.square(), other.square()) * count, func(one, other), count)

    def _change(self, cancelling: Tensor, total: Tensor, count: Tensor) -> Tensor:
        return (cancelling.sqrt() + total.abs() * count.sqrt() / 8) * self.rounding


def _repeat(terms: Tensor) -> bool:
    """Whether few of the terms that are not 0 differ."""
    asked = terms.flatten()[:: -(-terms.numel() // MOST_ASKED) or 1]
    bits = asked[asked != 0].float().view(torch.int32)
    return bits.numel() > 1 and torch.unique(bits >> 10).numel() <= max(1.0, FEW * bits.numel())
