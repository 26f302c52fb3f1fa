"""Finds chains in a graph that one `fused_conv` call computes: a layer with weights, and its epilogue."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ampopt.ir.graph import arguments, aten, calls, constant, is_constant, only_user, tensor_meta
from ampopt.ir.transform import Declined
from ampopt.kernels.conv_tiles import Site
from ampopt.kernels.pixel_layout import pixel_stride

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

LEAST_WIDTH = 16
"""Channels of a group below which neighbouring groups are computed together: a Tensor Core tile's width."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """A convolution or linear layer with the operators that are fused with it: `nodes`, in order."""

    nodes: tuple[fx.Node, ...]
    source: fx.Node
    reorder: bool
    """Whether the input must be copied first, because its channels are not innermost."""
    add: fx.Node | None
    scale: fx.Node | None
    site: Site

    @property
    def conv(self) -> fx.Node:
        """The convolution or linear layer."""
        return self.nodes[0]

    @property
    def last(self) -> fx.Node:
        """The node of the chain's result."""
        return self.nodes[-1]


def find_chains(
    module: fx.GraphModule, tf32: bool, *, merges: bool = True
) -> tuple[list[Chain], list[Declined]]:
    """All chains of the graph, without overlaps, and the declined nodes.

    `merges`: narrow groups may be computed several at a time, so that NaN of one reaches the others.
    """
    chains, declined, fused = list[Chain](), list[Declined](), set[fx.Node]()
    for conv in calls(module, [aten.conv2d.default, aten.linear.default]):
        if reason := _why_not(conv):
            declined.append(Declined(conv.name, reason))
            continue
        chain = _chain(module, conv, fused, tf32, merges)
        if isinstance(chain, str):
            declined.append(Declined(conv.name, chain))
            continue
        chains.append(chain)
        fused.update(chain.nodes)
    return chains, declined


def _why_not(conv: fx.Node) -> str | None:
    own = arguments(conv)
    if not is_constant(own["weight"]) or not (own["bias"] is None or is_constant(own["bias"])):
        return "its weight is computed"
    mine, source = tensor_meta(conv), tensor_meta(own["input"])
    if mine.dtype not in _DTYPES or source.dtype is not mine.dtype:
        return f"there is no kernel for {str(mine.dtype).removeprefix('torch.')}"
    if conv.target is aten.conv2d.default:
        if len(mine.shape) != 4:
            return "its input has no batch"
    elif len(mine.shape) < 2:
        return "its input has no batch"
    return None


def _chain(
    module: fx.GraphModule, conv: fx.Node, fused: set[fx.Node], tf32: bool, merges: bool
) -> Chain | str:
    """What can be computed together with a convolution; a reason where its layout is none of ours."""
    own = arguments(conv)
    source, scale = own["input"], None
    is_conv = conv.target is aten.conv2d.default
    geometry = geometry_of(own) if is_conv else ()
    weight = constant(module, own["weight"])
    assert weight is not None
    if is_conv and weight.shape[2:] == (1, 1) and geometry[2:4] == (0, 0) and own["groups"] == 1:
        source, scale = _scaled(source)
    meta = tensor_meta(source)
    pixel = pixel_stride(meta.shape, meta.stride, is_image=is_conv)
    if reorder := pixel is None:
        if not is_conv:
            return "its input is not contiguous"
        pixel = meta.shape[1]
    first, act1 = activation_after(conv)
    added, add = _addition(first, fused, is_conv)
    last, act2 = activation_after(added) if add is not None else (added, "")
    if not _is_dense(last, is_conv):
        return "the channels of its output are not innermost"
    groups = own["groups"] if is_conv else 1
    merge = merge_factor(tuple(weight.shape), groups)
    if merge > 1 and not merges:
        return "NaN of one of its groups would reach others, where values decide"
    shape = (weight.shape[0], weight.shape[1] * merge, *weight.shape[2:])
    dtype = tensor_meta(conv).dtype
    flags = (own["bias"] is not None, add is not None, scale is not None)
    site = Site(tuple(meta.shape), pixel, shape, geometry, groups // merge, dtype, *flags, act1, act2, tf32)
    if max(site.rows * shape[0], math.prod(meta.shape) // meta.shape[1 if is_conv else -1] * pixel) >= 2**31:
        return "its offsets do not fit into 32 bits"
    nodes = tuple(dict.fromkeys((conv, first, added, last)))
    return Chain(nodes, source, reorder, add, scale, site)


def geometry_of(own: Mapping[str, Any]) -> tuple[int, ...]:
    """Stride, padding and dilation, two numbers each, of the arguments of a convolution of images."""
    pairs = [own[key] for key in ("stride", "padding", "dilation")]
    return tuple(int(v) for pair in pairs for v in (pair * 2 if len(pair) == 1 else pair))


def merge_factor(weight_shape: Sequence[int], groups: int) -> int:
    """The number of neighbouring groups computed together; 1 for depthwise convolutions and wide groups."""
    if groups == 1 or (weight_shape[1] == 1 and weight_shape[0] == groups):
        return 1
    merge = 1
    while weight_shape[1] * merge < LEAST_WIDTH and groups % (2 * merge) == 0:
        merge *= 2
    return merge


def _scaled(source: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """x and s of a product with one number a channel that only a convolution reads; else the input itself."""
    if source.target is not aten.mul.Tensor or only_user(source) is None:
        return source, None
    for x, s in (source.args[:2], source.args[1::-1]):
        if isinstance(x, fx.Node) and isinstance(s, fx.Node):
            shape, factors = tensor_meta(x).shape, tensor_meta(s)
            same = tensor_meta(x).dtype is factors.dtype is tensor_meta(source).dtype
            whole = tuple(shape) == tuple(tensor_meta(source).shape)
            if same and whole and tuple(factors.shape) == (*shape[:2], 1, 1) and _is_dense(s, is_image=True):
                return x, s
    return source, None


def activation_after(node: fx.Node) -> tuple[fx.Node, str]:
    """The activation that alone reads a node, and its name; the node itself where there is none."""
    user = only_user(node)
    kind = _kind(user) if user is not None else ""
    if user is None or not kind or tensor_meta(user).dtype is not tensor_meta(node).dtype:
        return node, ""
    return user, kind


_PLAIN = {
    aten.relu.default: "relu",
    aten.relu6.default: "relu6",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.hardswish.default: "hardswish",
}


def _kind(node: fx.Node) -> str:
    if node.target in _PLAIN:
        return _PLAIN[node.target]
    if node.target is aten.gelu.default:
        return "gelu" if arguments(node)["approximate"] == "none" else "gelu_tanh"
    if node.target is aten.hardtanh.default:
        own = arguments(node)
        return "relu6" if (own["min_val"], own["max_val"]) == (0, 6) else ""
    if node.target is aten.clamp.default:
        own = arguments(node)
        return {(0, 6): "relu6", (0, None): "relu"}.get((own["min"], own["max"]), "")
    return ""


def _addition(node: fx.Node, fused: set[fx.Node], is_image: bool) -> tuple[fx.Node, fx.Node | None]:
    """The addition that alone reads a node, and what is added; the node itself where there is none."""
    user = only_user(node)
    if user is None or user in fused or user.target is not aten.add.Tensor or arguments(user)["alpha"] != 1:
        return node, None
    left, right = arguments(user)["self"], arguments(user)["other"]
    other = right if left is node else left
    if not isinstance(other, fx.Node) or other is node:
        return node, None
    mine, theirs = tensor_meta(node), tensor_meta(other)
    alike = (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype) and _is_dense(other, is_image)
    return (user, other) if alike and tensor_meta(user).dtype is mine.dtype else (node, None)


def _is_dense(node: fx.Node, is_image: bool) -> bool:
    """Whether the channels of a tensor are innermost, with nothing between its pixels."""
    meta = tensor_meta(node)
    return pixel_stride(meta.shape, meta.stride, is_image=is_image) == meta.shape[1 if is_image else -1]
