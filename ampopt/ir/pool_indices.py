"""`ampopt::max_pool2d_with_indices`: calls PyTorch's own pooling, so that compilers do not replace it.

If a window has several NaN, eager returns the index of the last, inductor that of the first. An unpooling
then writes NaN to another position, and an element that is NaN in eager is a number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ampopt.ir.graph import arguments, aten, calls, insert_call, reads_result, replace
from ampopt.system.once import once


@once
def max_pool2d_with_indices() -> torch._ops.OpOverload:
    """The operator; registered with PyTorch at the first call. Arguments and results are aten's."""
    made = torch.library.custom_op(
        "ampopt::max_pool2d_with_indices",
        _pool,
        mutates_args=(),
        schema="(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode) "
        "-> (Tensor, Tensor)",
    )
    made.register_fake(_pool)
    overload: torch._ops.OpOverload = torch.ops.ampopt.max_pool2d_with_indices.default
    return overload


def _pool(x: Tensor, *geometry: Sequence[int] | bool) -> tuple[Tensor, Tensor]:
    values, indices = torch.ops.aten.max_pool2d_with_indices.default(x, *geometry)
    return values, indices


def keep_indices(module: fx.GraphModule) -> None:
    """Use this operator for every pooling of the graph whose indices are read."""
    for node in calls(module, [aten.max_pool2d_with_indices.default]):
        if not reads_result(node, 1):
            continue
        own = arguments(node)
        geometry = (own["kernel_size"], own["stride"], own["padding"], own["dilation"], own["ceil_mode"])
        replace(node, insert_call(module, node, max_pool2d_with_indices(), own["self"], *geometry))
    module.recompile()
