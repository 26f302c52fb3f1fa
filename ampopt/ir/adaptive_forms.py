"""Poolings to a size for ONNX where the size of the image varies: torch.onnx has windows of one image's size.

PyTorch's window o of O along n pixels is from floor(o n / O) to the pixel before ceil((o + 1) n / O): windows
may differ by one pixel, and overlap. The form reads as many pixels for each as the widest has, whose numbers
the file computes of n, and leaves out those beyond a window's end.

Correct because: these are PyTorch's windows, in integers below 2**24, of which float32 divides all rightly. A
window of an image is some columns of some rows, so that its mean is that of the means of as many pixels each,
and its maximum the largest of maxima. What is left out is 0 in a sum, and no larger than any in a maximum.

For images of one size torch.onnx has windows of one size alone.

One window of all pixels is a reduction. torch.onnx has one for means; that of maxima is written here, as
PyTorch 2.11 exports windows of the example's size for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.errors import ExportError
from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, reads_result, replace_result, shape_of, where

_OF_MEANS = (
    *(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
)

_OF_MAXIMA = (
    *(aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default),
)


def means_of_windows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """The average pooling of the last dimensions to these sizes, computed in float32 at least."""
    means = x.to(torch.promote_types(x.dtype, torch.float32))
    for dim, count in _pooled(x, counts):
        windows, is_beyond, lengths = _windows(means, dim, count)
        means = windows.masked_fill(is_beyond, 0.0).sum(dim) / lengths
    return means.to(x.dtype)


def maxima_of_windows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """The maximum pooling of the last dimensions to these sizes."""
    for dim, count in _pooled(x, counts):
        windows, is_beyond, _ = _windows(x, dim, count)
        x = windows.masked_fill(is_beyond, -torch.inf).amax(dim)
    return x


def _largest(x: Tensor, counts: Sequence[int]) -> Tensor:
    return x.amax(list(range(-len(counts), 0)), keepdim=True)


def _place_of_the_largest(x: Tensor, counts: Sequence[int]) -> Tensor:
    place = x.flatten(-len(counts)).argmax(-1)
    return place.view(*place.shape, *counts)


def _pooled(x: Tensor, counts: Sequence[int]) -> list[tuple[int, int]]:
    """The dimensions, from the last, which get another size, and that size."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # it takes a second to load

    dims = enumerate(counts, start=-len(counts))
    return [(dim, count) for dim, count in dims if not statically_known_true(x.shape[dim] == count)]


def _windows(x: Tensor, dim: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The windows along a dimension, whose pixels are in `dim` and they before it.

    Also what of them is beyond their end, and their lengths, both for the dimensions from theirs on.
    """
    size, after = x.shape[dim], [1] * (-dim - 1)
    numbers = torch.arange(count, device=x.device)
    begins = numbers * size // count
    ends = ((numbers + 1) * size + count - 1) // count
    widest = (size + count - 1) // count + 1
    pixels = begins[:, None] + torch.arange(widest, device=x.device)
    read = x.index_select(dim, torch.minimum(pixels, ends[:, None] - 1).flatten())
    is_beyond = (pixels >= ends[:, None]).view(count, widest, *after)
    return read.unflatten(dim, (count, widest)), is_beyond, (ends - begins).view(count, *after)


def _means(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    return None if _is_of_all(values) else call(means_of_windows, values["self"], values["output_size"])


def _maxima(call: Call, node: fx.Node) -> None:
    values = arguments(node)
    of_all = _is_of_all(values)
    if reads_result(node, 1) and not of_all:
        raise ExportError(f"ONNX has no pooling to a size that tells places, and sizes vary: {where(node)}")
    _give_maxima(call, node)


def _give_maxima(call: Call, node: fx.Node) -> None:
    values = arguments(node)
    of_all = _is_of_all(values)
    for reader in list(node.users):
        form = maxima_of_windows
        if of_all:
            form = _place_of_the_largest if reader.args[1] == 1 else _largest
        replace_result(reader, call(form, values["self"], values["output_size"]))


def _is_of_all(values: Mapping[str, Any]) -> bool:
    """Whether there is one window."""
    return all(count == 1 for count in values["output_size"])


def _in_tiles(call: Call, node: fx.Node) -> Any:
    """Windows of one size, where the result's size divides the image's: PyTorch 2.10 does not write it so."""
    from torch._decomp import decomposition_table  # slow to import

    values = arguments(node)
    sizes, wanted = shape_of(values["self"])[-2:], values["output_size"]
    if node.target in decomposition_table:
        return None
    tile = [size // each for size, each in zip(sizes, wanted, strict=True)]
    return call(aten.max_pool2d_with_indices.default, values["self"], tile)


def _maxima_of_one_size(call: Call, node: fx.Node) -> Any:
    """Windows that differ by a pixel, which torch.onnx has not, and tiles."""
    values = arguments(node)
    if not all(values["output_size"]):
        return None
    if not _differ(values):
        return _in_tiles(call, node) if node.target is aten.adaptive_max_pool2d.default else None
    return None if reads_result(node, 1) else _give_maxima(call, node)


def _means_of_one_size(call: Call, node: fx.Node) -> Any:
    return _means(call, node) if _differ(values := arguments(node)) and all(values["output_size"]) else None


def _differ(values: Mapping[str, Any]) -> bool:
    """Whether the windows are not all of one size."""
    counts = values["output_size"]
    sizes = shape_of(values["self"])[-len(counts) :]
    return any(size % count for size, count in zip(sizes, counts, strict=True) if count)


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    **dict.fromkeys(_OF_MAXIMA, _maxima_of_one_size),
    aten.adaptive_avg_pool3d.default: _means_of_one_size,
}
"""The forms for images of one size."""

TO_SIZES: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    **dict.fromkeys(_OF_MEANS, _means),
    **dict.fromkeys(_OF_MAXIMA, _maxima),
}
"""For each pooling, a function of (call, node) that makes its form for images whose size varies."""
