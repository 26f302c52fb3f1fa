"""Copies of models in float64, also of those that make tensors of lower precision by themselves."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.ir.eager_mode import EagerMode
from ampopt.ir.model_copy import private_copy
from ampopt.ir.numerics import widened

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

_SAME: dict[torch.dtype, torch.dtype] = {}

Scope = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a copy in float64 is called."""


def copy_in_float64(model: nn.Module) -> nn.Module:
    """A private copy of a model whose parameters and buffers are float64 or complex128."""
    exact = private_copy(model).double()
    for tensor in (*exact.parameters(), *exact.buffers()):
        tensor.data = widened(tensor.data)  # complex ones, too
    return exact


class AllInFloat64(EagerMode):
    """A mode in which no operator computes in a lower precision than float64.

    A copy of a model in float64 may make tensors of float32 itself: grids of coordinates, encodings of
    positions, constants that are no buffers, casts before a normalization. A product or a sampling of both
    dtypes raises. Here an operator's tensors are widened before it, what it is asked to make or to cast to
    (`dtype=`) is float64, and so is its result. Drawn numbers are those of their own dtype, widened. What is
    written stays where it is, as do views, through which it may be. Bits that are read as another dtype would
    be those of a float64.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator in float64.

        Raises TypeError for bits read as another dtype.
        """
        operator = _operator(func)
        if operator.reads_bits:
            raise TypeError("it reads the bits of a tensor as another dtype")
        if operator.is_view:
            return func(*args, **(kwargs or {}))
        written, dtypes = operator.written, _SAME if operator.is_drawn else _WIDER
        by_place = [value if place in written else _wider(value, dtypes) for place, value in enumerate(args)]
        by_name = {
            name: value if name in written else _wider(value, dtypes)
            for name, value in (kwargs or {}).items()
        }
        result = func(*by_place, **by_name)
        return result if written else _wider(result, _SAME)


@dataclasses.dataclass(frozen=True)
class _Operator:
    """What an operator does to its arguments; `written` are their places and their names."""

    reads_bits: bool
    is_view: bool
    is_drawn: bool
    written: frozenset[int | str]


@functools.cache
def _operator(func: Any) -> _Operator:
    returns = [each.alias_info for each in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returns)
    written = [
        (place, each.name)
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return _Operator(
        reads_bits=func is torch.ops.aten.view.dtype,
        is_view=is_view and func is not torch.ops.aten.lift_fresh.default,
        is_drawn=torch.Tag.nondeterministic_seeded in func.tags,
        written=frozenset(itertools.chain.from_iterable(written)),
    )


def _wider(value: Any, dtypes: Mapping[torch.dtype, torch.dtype]) -> Any:
    """A tensor, a dtype, or a list of them, widened; all else as it is."""
    if isinstance(value, Tensor):
        return widened(value)
    if isinstance(value, torch.dtype):
        return dtypes.get(value, value)
    if isinstance(value, (list, tuple)):
        return type(value)([_wider(each, dtypes) for each in value])
    return value


SCOPES: tuple[Scope, ...] = (nullcontext, AllInFloat64)
"""In which a copy in float64 is called: as it is, or, where that fails, with all that it makes widened."""
