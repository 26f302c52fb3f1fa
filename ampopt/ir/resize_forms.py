"""Interpolations by a factor, which ONNX holds in float32, with the sizes that PyTorch gives in float64.

PyTorch's size is floor(size * factor) in float64: 0.7 of 90 is 62, as 0.7 is a little less, and 0.7 of 20 is
14, as the product is rounded. A runtime computes the same of the factor in float32, and has 63 or 13. The
form has a factor within a few roundings of that, whose product with the size is as PyTorch's; pixels are
taken at places that differ by as little.

The nearest pixel may be another one where a place is rounded: of 20 pixels by 1.2 it is PyTorch's 14 at 18,
as 18 times the float32 of 1 / 1.2 is below 15, and a runtime's 15, which divides. The form takes pixels by
their numbers, which PyTorch's own operator gives of a row of numbers: they depend on sizes alone. Where sizes
vary and one factor does not fit all, there is no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ampopt.errors import ExportError
from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import add_constant, arguments, aten, calls, shape_of, where

MOST_ROUNDINGS = 16
"""How far a factor may be from the nearest one in float32, in roundings: 1e-6 of it, a pixel in a million."""

MOST_PIXELS = 4096
"""Sizes up to this are looked at where they vary."""

_DOWN = (aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec)
"""Operators that round places down; the others round to the nearest."""

_EXACT = (
    *(aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact2d.vec),
    aten._upsample_nearest_exact3d.vec,
)

_NEAREST = (*_DOWN, *_EXACT)

_OF_A_ROW: Mapping[Any, Any] = {
    **dict.fromkeys(_DOWN, aten.upsample_nearest1d.default),
    **dict.fromkeys(_EXACT, aten._upsample_nearest_exact1d.default),
}
"""For each operator, that which takes the same pixels of one row."""

_BETWEEN = (
    *(aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec),
    *(aten.upsample_bicubic2d.vec, aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec),
)


_ADAPTIVE = (
    *(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
    *(aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default),
)


def fitting_factor(factor: float, size: int) -> float | None:
    """The number in float32 nearest to a factor that makes of a size what PyTorch makes of it; None: none."""
    wanted = math.floor(size * factor)
    for candidate in _near(factor):
        if np.floor(np.float32(size) * candidate) == wanted == math.floor(size * float(candidate)):
            return float(candidate)
    return None


def _near(factor: float) -> Iterator[np.float32]:
    yield np.float32(factor)
    below = above = np.float32(factor)
    for _ in range(MOST_ROUNDINGS):
        below, above = np.nextafter(below, np.float32(-math.inf)), np.nextafter(above, np.float32(math.inf))
        yield below
        yield above


def _resized(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    if (factors := values["scale_factors"]) is None:
        return None
    sizes = shape_of(values["input"])[2:]
    found = [fitting_factor(factor, size) for factor, size in zip(factors, sizes, strict=True)]
    if None in found or found == [float(np.float32(factor)) for factor in factors]:
        return None
    return call(node.target, **{**values, "scale_factors": found})


def _by_number(call: Call, node: fx.Node) -> Any:
    """Pixels by their numbers along each dimension, but where all are repeated, which runtimes do quickly."""
    values, module = arguments(node), node.graph.owning_module
    found, sizes = values["input"], (shape_of(values["input"])[2:], shape_of(node)[2:])
    factors = values["scale_factors"] or [None] * len(sizes[0])
    operator = _OF_A_ROW[node.target]
    numbers = [_numbers(operator, *each) for each in zip(*sizes, factors, strict=True)]
    if all(map(_is_repeated, numbers, *sizes)):
        return None
    assert module is not None
    for dim, pixels in enumerate(numbers, start=2):
        found = call(aten.index_select.default, found, dim, add_constant(module, "pixels", pixels, node))
    return found


def _numbers(operator: Any, size: int, wanted: int, factor: float | None) -> Tensor:
    """Which pixel of a row PyTorch takes at each place of the resized one."""
    row = torch.arange(size, dtype=torch.float32)
    resized: Tensor = operator(row[None, None], [wanted], factor)
    return resized.flatten().long()


def _is_repeated(numbers: Tensor, size: int, wanted: int) -> bool:
    """Whether every pixel is there as often as every other one, in order."""
    return wanted % size == 0 and torch.equal(numbers, torch.arange(wanted) // (wanted // size))


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = dict.fromkeys(_BETWEEN, _resized)
"""The forms of interpolations of images of one size."""

BY_NUMBER: Mapping[Any, Callable[[Call, fx.Node], Any]] = dict.fromkeys(_NEAREST, _by_number)
"""The forms of the nearest pixels where no size varies."""


def check_varying(module: fx.GraphModule) -> None:
    """Raise ExportError for an interpolation that has another size, or pixels, in ONNX, where sizes vary."""
    for node in calls(module, (*_NEAREST, *_BETWEEN)):
        for factor in arguments(node)["scale_factors"] or ():
            if not np.array_equal(_sizes(np.float64(factor)), _sizes(np.float32(factor))):
                other = "sizes"
            elif node.target in _DOWN and not _has_same_pixels(factor):
                other = "pixels"
            else:
                continue
            raise ExportError(
                f"ONNX holds factors in float32, so that an interpolation by {factor} has other {other} "
                f"there than in PyTorch, and sizes vary: {where(node)}; give it sizes, or one shape"
            )


def of_one_size(module: fx.GraphModule) -> fx.Node | None:
    """The first operator with a result of one size, more than a pixel, whatever size its input has.

    torch.onnx may take the example's size for it: where a file is wrong at other sizes, it is a likely cause.
    """
    for node in calls(module, (*_ADAPTIVE, *_NEAREST, *_BETWEEN)):
        size = arguments(node).get("output_size") or ()
        if any(isinstance(each, int) and each > 1 for each in size):
            return node
    return None


def _sizes(factor: Any) -> Any:
    """The sizes that a factor gives, computed in its precision."""
    return np.floor(np.arange(1, MOST_PIXELS + 1).astype(type(factor)) * factor)


def _has_same_pixels(factor: float) -> bool:
    """Whether a place divided by a factor is rounded down as that times the reciprocal is, as in PyTorch."""
    places = np.arange(MOST_PIXELS, dtype=np.float32)
    return np.array_equal(np.floor(places / np.float32(factor)), np.floor(places * np.float32(1 / factor)))
