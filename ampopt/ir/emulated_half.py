"""Emulates float16 products on a CPU at float32 speed: computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ampopt.ir.graph import aten

_PRODUCTS = {
    aten.convolution.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


class EmulatedHalf(TorchDispatchMode):
    """Computes convolutions and matrix products of float16 CPU tensors in float32, and rounds the results.

    Rounding the result of float32 arithmetic on float16 operands is what a GPU's matrix units do. A CPU
    without float16 arithmetic takes hundreds of times as long for its own float16 convolutions.
    """

    supports_higher_order_operators = True
    """They run as they are: an operator of the user's that writes to its arguments is in one of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_active(cls) -> bool:
        """Whether the mode is active in this thread."""
        return any(isinstance(mode, cls) for mode in _get_current_dispatch_mode_stack())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        if func not in _PRODUCTS or not any(t.dtype is torch.float16 and t.is_cpu for t in operands):
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.float, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda t: t.half() if t.dtype is torch.float32 else t, result)
