"""Copies of models in float64, also of those that make tensors of lower precision by themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt.ir.model_copy import private_copy
from ampopt.ir.numerics import widened

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

Scope = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a copy in float64 is called."""


def copy_in_float64(model: nn.Module) -> nn.Module:
    """A private copy of a model whose parameters and buffers are float64 or complex128."""
    exact = private_copy(model).double()
    for tensor in (*exact.parameters(), *exact.buffers()):
        tensor.data = widened(tensor.data)  # complex ones, too
    return exact


class AllInFloat64(TorchDispatchMode):
    """A mode in which no operator computes in a lower precision than float64.

    A copy of a model in float64 may make tensors of float32 itself: grids of coordinates, encodings of
    positions, constants that are no buffers, casts before a normalization. A product or a sampling of both
    dtypes raises. Here an operator's tensors are widened before it, what it is asked to make or to cast to
    (`dtype=`) is float64, and so is its result. Drawn numbers are those of their own dtype, widened. What is
    written stays where it is, as do views, through which it may be. Bits that are read as another dtype would
    be those of a float64.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator in float64.

        Raises TypeError for bits read as another dtype.
        """
        if func is torch.ops.aten.view.dtype:
            raise TypeError("it reads the bits of a tensor as another dtype")
        if func is not torch.ops.aten.lift_fresh.default and _is_view(func):
            return func(*args, **(kwargs or {}))
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags

        def wider(value: Any) -> Any:
            if isinstance(value, Tensor):
                return widened(value)
            return value if is_drawn or not isinstance(value, torch.dtype) else _WIDER.get(value, value)

        arguments = func._schema.arguments
        names = [each.name for each in arguments]
        written = {
            each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write
        }
        by_place = (
            value if name in written else pytree.tree_map(wider, value)
            for name, value in zip(names, args, strict=False)
        )
        by_name = {
            name: value if name in written else pytree.tree_map(wider, value)
            for name, value in (kwargs or {}).items()
        }
        result = func(*by_place, **by_name)
        return result if written else pytree.tree_map_only(Tensor, widened, result)


def _is_view(func: Any) -> bool:
    returns = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


SCOPES: tuple[Scope, ...] = (nullcontext, AllInFloat64)
"""In which a copy in float64 is called: as it is, or, where that fails, with all that it makes widened."""
