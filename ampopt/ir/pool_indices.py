"""Max pooling with indices by operators of ours that call PyTorch's, so that compilers do not replace it.

If a window has several NaN, eager returns the index of the last, inductor that of the first. An unpooling
then writes NaN to another position, and an element that is NaN in eager is a number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.ir.graph import arguments, aten, calls, insert_call, reads_result, replace
from ampopt.system.once import once

_GEOMETRY = "int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode"

_POOLINGS = {
    aten.max_pool2d_with_indices.default: ("max_pool2d_with_indices", _GEOMETRY),
    aten.adaptive_max_pool2d.default: ("adaptive_max_pool2d", "int[] output_size"),
}
"""The operators that inductor replaces, with the names of ours and their arguments after the image."""


@once
def pooling_operators() -> dict[Any, torch._ops.OpOverload]:
    """For each of those operators, ours; registered with PyTorch at the first call."""
    made: dict[Any, torch._ops.OpOverload] = {}
    for pooling, (name, arguments_of) in _POOLINGS.items():
        pool = functools.partial(_pool, pooling)
        schema = f"(Tensor x, {arguments_of}) -> (Tensor, Tensor)"
        own = torch.library.custom_op(f"ampopt::{name}", pool, mutates_args=(), schema=schema)
        own.register_fake(pool)
        made[pooling] = getattr(torch.ops.ampopt, name).default
    return made


def _pool(pooling: Any, x: Tensor, *geometry: Sequence[int] | bool) -> tuple[Tensor, Tensor]:
    values, indices = pooling(x, *geometry)
    return values, indices


def keep_indices(module: fx.GraphModule) -> None:
    """Use these operators for every pooling of the graph whose indices are read."""
    for node in calls(module, _POOLINGS):
        if reads_result(node, 1):
            own = arguments(node)
            given = [own[each.name] for each in node.target._schema.arguments]  # type: ignore[union-attr]
            replace(node, insert_call(module, node, pooling_operators()[node.target], *given))
    module.recompile()
