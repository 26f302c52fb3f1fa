"""Finds the calls of a graph that decide by values, so that one NaN more is another number of a result."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx
from torch.fx.passes.shape_prop import TensorMetadata

from ampopt.ir.graph import arguments, aten, tensor_meta

_TAKING_NAN = frozenset(
    {aten.nan_to_num, aten.fmax, aten.fmin, aten.nansum, aten.nanmean, aten.nanmedian, aten.nanquantile}
    | {aten.sign, aten.sgn, aten.heaviside, aten.copysign}
    | {aten.sort, aten.msort, aten.topk, aten.kthvalue, aten.mode, aten.histc, aten.histogram}
    | {aten.fake_quantize_per_tensor_affine, aten.fake_quantize_per_channel_affine}
    | {aten._fake_quantize_learnable_per_tensor_affine, aten._fake_quantize_learnable_per_channel_affine}
)
"""Operators that make numbers of NaN, or leave it out, or put other numbers in order beside it.

Found by calling all of PyTorch's operators with NaN; the order, by their documentation.
"""

_GRIDS = frozenset({aten.grid_sampler, aten.grid_sampler_2d, aten.grid_sampler_3d})
_BILINEAR, _BICUBIC, _ZEROS = 0, 2, 0
"""Operators that read at places that numbers say, and their modes."""

_MOVING = frozenset({aten._to_copy, aten.clone, aten.cat, aten.concat, aten.stack})
"""Operators that give the elements that they are given, beside views and casts that may be one."""


def deciding_node(module: fx.GraphModule) -> fx.Node | None:
    """`shapes.decides_by_values` for a graph whose shapes are recorded."""
    computed, combined = set[fx.Node](), set[fx.Node]()  # from inputs; of more than one element each
    node: fx.Node
    for node in module.graph.nodes:
        meta = node.meta.get("tensor_meta")
        is_number = isinstance(meta, TensorMetadata) and (
            meta.dtype.is_floating_point or meta.dtype.is_complex
        )
        if node.op == "placeholder" and is_number:
            computed.add(node)
        elif not computed.isdisjoint(node.all_input_nodes) and node.op != "output":
            if not combined.isdisjoint(node.all_input_nodes):
                if _takes_nan(node, combined):
                    return node
                combined.add(node)
            elif not _is_of_one_element(node):
                combined.add(node)
            computed.add(node)
            if (
                isinstance(meta, TensorMetadata)
                and not is_number
                and any(u.op != "output" for u in node.users)
            ):
                return node
    return None


def _takes_nan(node: fx.Node, combined: Collection[fx.Node]) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _TAKING_NAN or (packet in _GRIDS and _reads_somewhere(node, combined))


def _reads_somewhere(node: fx.Node, combined: Collection[fx.Node]) -> bool:
    """Whether NaN among the places that are read is another place, or none, and no weight of what is read."""
    given = arguments(node)
    mode, is_image = given["interpolation_mode"], len(tensor_meta(node).shape) == 4
    keeps = mode == _BICUBIC or (mode == _BILINEAR and given["padding_mode"] == _ZEROS and is_image)
    return given["grid"] in combined and not keeps


def _is_of_one_element(node: fx.Node) -> bool:
    """Whether each element of a result is of one element of each operand: NaN in another one is no matter."""
    overload = node.target
    if not isinstance(overload, torch._ops.OpOverload):
        return overload is operator.getitem
    is_view = any(result.alias_info is not None for result in overload._schema.returns)
    return is_view or torch.Tag.pointwise in overload.tags or overload.overloadpacket in _MOVING
