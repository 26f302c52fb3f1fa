"""Objects in a model's arguments and results that hold tensors, and that PyTorch cannot take apart."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def unknown_container(leaves: Iterable[object]) -> str | None:
    """What among a call's leaves PyTorch refuses to take apart, and what makes it known; None: nothing.

    It is a dataclass, or an object that holds tensors. Tuples, lists, dicts and named tuples are no leaves,
    nor are dataclasses and classes that are registered.
    """
    for leaf in leaves:
        if isinstance(leaf, (Tensor, nn.Module, type, enum.Enum, types.FunctionType)):
            continue
        kind = type(leaf).__qualname__
        if dataclasses.is_dataclass(leaf):
            return f"a dataclass that PyTorch does not know: torch.export.register_dataclass({kind}) tells it"
        if _holds_tensors(leaf):
            return f"an object of the class {kind}, which PyTorch cannot take apart, as it can a dict"
    return None


def _holds_tensors(value: Any) -> bool:
    own = getattr(value, "__dict__", None)
    return isinstance(own, dict) and any(
        isinstance(p, Tensor) for p in pytree.tree_leaves(list(own.values()))
    )
