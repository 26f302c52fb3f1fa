"""Finds convolutions of a program's images that one `image_conv` call computes, with what converts them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.ir.graph import arguments, aten, constant, is_constant, only_user, tensor_meta
from ampopt.ir.program import Border, Program
from ampopt.ir.transform import Declined
from ampopt.kernels.conv_chains import activation_after, geometry_of
from ampopt.kernels.fused_conv import fused_conv
from ampopt.kernels.image_conv import LARGEST_OFFSET, MOST_DEEP

MOST_CHANNELS = 4
"""Channels of an image: of more, memory is read as fast with the channel innermost."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CONVERSIONS = (aten.clone.default, aten.contiguous.default, aten.to.dtype)


@dataclasses.dataclass(frozen=True)
class ImageChain:
    """A convolution of an input, with the conversions before it and the activation after it."""

    image: fx.Node
    source: fx.Node
    """What the convolution reads: the image, or a conversion of it that nothing else reads."""
    conv: fx.Node
    last: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    geometry: tuple[int, ...]
    act: str
    dtype: torch.dtype
    """Of the result, as it is wanted."""
    innermost: bool
    is_given_back: bool
    """Whether the caller gets the result, and nothing else reads it."""

    @property
    def call(self) -> tuple[Any, ...]:
        """The arguments of `image_conv` after the weights, but for the tile."""
        return list(self.geometry), self.act, self.dtype, self.innermost


def image_chains(
    module: fx.GraphModule, program: Program
) -> tuple[dict[int, list[ImageChain]], list[Declined]]:
    """The chains of every input that they alone read, by its place among the inputs, and what is declined.

    `module` is a copy of the program's graph with recorded shapes.
    """
    found, declined = dict[int, list[ImageChain]](), list[Declined]()
    for place, image in enumerate(node for node in module.graph.nodes if node.op == "placeholder"):
        example = program.examples[place]
        if example.dim() != 4 or example.shape[1] > MOST_CHANNELS or example.dtype not in _DTYPES:
            continue
        chains = [_chain(module, program, place, [image, user]) for user in image.users]
        if reasons := [each for each in chains if isinstance(each, Declined)]:
            declined += reasons[:1]
        elif chains:
            found[place] = [each for each in chains if isinstance(each, ImageChain)]
    return found, declined


def _chain(
    module: fx.GraphModule, program: Program, place: int, path: list[fx.Node]
) -> ImageChain | Declined:
    """The chain that begins with an input and what reads it; a reason where there is none."""
    while path[-1].target in _CONVERSIONS and (reader := only_user(path[-1])) is not None:
        path = [*path, reader]
    *before, conv = path
    layer = _layer(conv)
    if isinstance(layer, str):
        return Declined(conv.name, layer)
    w, bias, geometry, act = layer
    if not is_constant(w) or not (bias is None or is_constant(bias)):
        return Declined(conv.name, "its weight is computed")
    weight = constant(module, w)
    assert weight is not None
    if math.prod(weight.shape[1:]) > MOST_DEEP:
        return Declined(conv.name, f"its filters hold more than {MOST_DEEP} numbers: cuDNN is faster there")
    passed = [program.examples[place].dtype, *(tensor_meta(node).dtype for node in before)]
    if weight.dtype not in _DTYPES or not _is_rounded_once(passed, weight.dtype):
        return Declined(conv.name, "its image is rounded to another dtype on the way")
    last, after = (conv, "") if act else activation_after(conv)
    wanted = _wanted(program, last)
    if isinstance(wanted, str):
        return Declined(conv.name, wanted)
    counts = [math.prod(tensor_meta(node).shape) for node in (path[0], last)]
    if min(counts) == 0 or max(counts) >= LARGEST_OFFSET:
        return Declined(conv.name, "it is empty, or its offsets do not fit into 32 bits")
    return ImageChain(path[0], before[-1], conv, last, w, bias, geometry, act or after, *wanted)


def _is_rounded_once(passed: Sequence[torch.dtype], wanted: torch.dtype) -> bool:
    """Whether numbers that pass through these dtypes keep the first one until they have the wanted one."""
    changed = list(itertools.dropwhile(lambda dtype: dtype is passed[0], passed))
    return passed[-1] is wanted and all(dtype is wanted for dtype in changed)


def _layer(conv: fx.Node) -> tuple[fx.Node, fx.Node | None, tuple[int, ...], str] | str:
    """Weight, bias, geometry and activation of a convolution of images; a reason where it is none."""
    if conv.target is fused_conv():
        own = arguments(conv)
        if own["groups"] != 1 or own["z"] is not None or own["s"] is not None or not own["geometry"]:
            return "it does more than convolve an image"
        return own["w"], own["b"], tuple(own["geometry"]), own["act1"]
    if conv.target not in (aten.conv2d.default, aten.cudnn_convolution_relu.default):
        return "it reads the image, and is no convolution"
    own = arguments(conv)
    if own["groups"] != 1:
        return "it has groups"
    act = "relu" if conv.target is aten.cudnn_convolution_relu.default else ""
    return own["weight"], own["bias"], geometry_of(own), act


def _wanted(program: Program, last: fx.Node) -> tuple[torch.dtype, bool, bool] | str:
    """The dtype of a result, whether its channels are innermost, and whether the caller gets it."""
    reader, meta = only_user(last), tensor_meta(last)
    if reader is not None and reader.op == "output":
        border = program.exit[list(reader.args[0]).index(last)]  # type: ignore[arg-type]
        if border.dtype in _DTYPES:
            return border.dtype, border.memory_format is torch.channels_last, True
    told = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    if told.is_contiguous(memory_format=torch.channels_last):
        return meta.dtype, True, False
    return (meta.dtype, False, False) if told.is_contiguous() else "its result lies in another order"


def as_given(example: Tensor) -> Border:
    """The border that leaves an image as its caller gives it."""
    innermost = not example.is_contiguous() and example.is_contiguous(memory_format=torch.channels_last)
    return Border(example.dtype, torch.channels_last if innermost else torch.contiguous_format)
