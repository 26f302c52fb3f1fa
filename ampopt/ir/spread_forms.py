"""Standard deviations and variances of very large and very small numbers, for runtimes with float32 squares.

PyTorch adds the squares of float32 numbers in float64 on a CPU. torch.onnx writes them in float32, where the
square of 1e20 is infinite and that of 1e-23 is 0: `(x - x.mean()) / x.std()` was 0 or infinite there.

Correct because: numbers beyond `LARGE` are multiplied by `DOWN` and those of at most `SMALL` by its inverse,
powers of two, before the operator, and its result is multiplied by what undoes it. That rounds nothing, and
numbers in between are multiplied by 1. Deviations of less than a rounding of the largest number are no
numbers of float32 then, as they are none before. Of infinities a mean is infinite, where PyTorch's beside a
deviation may be NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, dtype_of, replace_result, shape_of
from ampopt.ir.part_forms import spread_of_selected

LARGE, SMALL = 1e10, 1e-10
"""The squares of what lies between, and of its roundings, are numbers of float32."""

DOWN = 2.0**-80
"""From float32's largest number, 2**128, to one whose square is far from that; its inverse as far up."""


_DEVIATIONS = (aten.std.default, aten.std.dim, aten.std.correction)
_VARIANCES = (aten.var.default, aten.var.dim, aten.var.correction)
_WITH_MEAN: dict[Any, Any] = {
    **dict.fromkeys((aten.std_mean.default, aten.std_mean.dim, aten.std_mean.correction), _DEVIATIONS[0]),
    **dict.fromkeys((aten.var_mean.default, aten.var_mean.dim, aten.var_mean.correction), _VARIANCES[0]),
}


@dataclasses.dataclass
class _Scaled:
    """Numbers whose squares are numbers of float32, and what undoes the factor of a result of theirs."""

    call: Call
    numbers: Any
    dims: list[int]
    keepdim: bool
    correction: float
    undone: Any

    def spread(self, target: Any) -> Any:
        """The standard deviation or the variance, whichever the operator gives."""
        options = {"correction": self.correction, "keepdim": self.keepdim}
        if target in _DEVIATIONS:
            found = self.call(aten.std.correction, self.numbers, self.dims, **options)
            return self.call(aten.mul.Tensor, found, self.undone)
        found = self.call(aten.var.correction, self.numbers, self.dims, **options)
        return self.call(aten.mul.Tensor, self.call(aten.mul.Tensor, found, self.undone), self.undone)

    def mean(self) -> Any:
        """The mean, whose sum does not overflow either."""
        found = self.call(aten.mean.dim, self.numbers, self.dims, self.keepdim)
        return self.call(aten.mul.Tensor, found, self.undone)


def _scaled(call: Call, node: fx.Node) -> _Scaled | None:
    """The scaled numbers of an operator; None where nothing is to be scaled."""
    values = arguments(node)
    source, keepdim = values["self"], values.get("keepdim", False)
    rank = len(shape_of(source))
    if dtype_of(source) is not torch.float32 or rank == 0:
        return None
    dims = [dim % rank for dim in values.get("dim") or range(rank)]
    correction = values.get("correction")
    if correction is None:
        correction = 1.0 if values.get("unbiased", True) else 0.0
    size = call(aten.amax.default, call(aten.abs.default, source), dims, True)
    undone = _chosen(call, size, 1 / DOWN, DOWN)
    if not keepdim:
        undone = call(aten.squeeze.dims, undone, dims)
    numbers = call(aten.mul.Tensor, source, _chosen(call, size, DOWN, 1 / DOWN))
    return _Scaled(call, numbers, dims, keepdim, correction, undone)


def _chosen(call: Call, size: Any, of_large: float, of_small: float) -> Any:
    """For each size the factor of its range."""
    one = call(aten.ones_like.default, size)
    large = call(aten.masked_fill.Scalar, one, call(aten.gt.Scalar, size, LARGE), of_large)
    return call(aten.masked_fill.Scalar, large, call(aten.le.Scalar, size, SMALL), of_small)


def _spread(call: Call, node: fx.Node) -> Any:
    selected = spread_of_selected(call, node, is_deviation=node.target in _DEVIATIONS)
    if selected is not None:
        return selected
    scaled = _scaled(call, node)
    return None if scaled is None else scaled.spread(node.target)


def _spread_and_mean(call: Call, node: fx.Node) -> None:
    """Each by itself, for those that read it."""
    if (scaled := _scaled(call, node)) is None:
        return
    for reader in list(node.users):
        is_mean = reader.args[1] == 1
        replace_result(reader, scaled.mean() if is_mean else scaled.spread(_WITH_MEAN[node.target]))


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    **dict.fromkeys((*_DEVIATIONS, *_VARIANCES), _spread),
    **dict.fromkeys(_WITH_MEAN, _spread_and_mean),
}
