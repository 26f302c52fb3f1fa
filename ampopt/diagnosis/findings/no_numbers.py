"""no-numbers: a model whose results are NaN or infinite throughout, so that its errors cannot be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding, counted
from ampopt.ir.lanes import FP32
from ampopt.ir.numerics import is_rounded
from ampopt.ir.origin import place_of
from ampopt.ir.own_autocast import own_scope
from ampopt.ir.program import Program

NAMED = 3
"""Weights that are named."""

Spoilt = Callable[[Tensor], Tensor]
"""`torch.isnan`, or `torch.isinf`."""


def find(case: Case) -> Iterator[Finding]:
    """Executed: one call in FP32. Some results that are NaN among others are a note: they may be meant."""
    results = _floats(case.eager()())
    total = sum(result.numel() for result in results)
    nan = _count(results, torch.isnan)
    if not total or nan + _count(results, torch.isinf) < total:
        if nan:
            case.notes.append(f"{nan} of {counted(total, 'number', 'numbers')} of the results are NaN")
        return
    spoilt: Spoilt = torch.isnan if nan else torch.isinf
    kind = "NaN" if nan else "infinite"
    first = None if (program := case.start(FP32)) is None else _first(program, spoilt)
    yield Finding(
        "no-numbers",
        f"the results have no number, {kind if nan in (0, total) else 'NaN or infinite'} in every place"
        f"{'' if first is None else f': {first.name} is the first operator that gives {kind}'}"
        f"{_weights(case, spoilt, kind)}",
        places=() if first is None else tuple(part for part in (place_of(first),) if part),
        advice="look at the weights and at the inputs of that operator",
        is_fault=True,
    )


def _weights(case: Case, spoilt: Spoilt, kind: str) -> str:
    state = case.original.state_dict()
    names = [name for name, value in state.items() if _count(_floats(value), spoilt)]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"; {kind} in the weights: {', '.join(names[:NAMED])}{more}" if names else ""


def _first(program: Program, spoilt: Spoilt) -> fx.Node | None:
    """The first operator of a graph that gives such values."""
    with program.scope():
        entered = [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]
        run = _Until(program, spoilt)
        run.run(*entered)
    return run.first


class _Until(fx.Interpreter):
    """Runs a graph, and notes the first operator that gives NaN, or infinity."""

    def __init__(self, program: Program, spoilt: Spoilt) -> None:
        super().__init__(program.graph)
        self._device, self._spoilt = program.device, spoilt
        self.first: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        with own_scope(n, self._device):
            result = super().run_node(n)
        if self.first is None and n.op == "call_function" and _count(_floats(result), self._spoilt):
            self.first = n
        return result


def _floats(value: Any) -> list[Tensor]:
    """The strided tensors in a value whose numbers may be NaN."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and is_rounded(leaf)]


def _count(tensors: list[Tensor], spoilt: Spoilt) -> int:
    return sum(int(spoilt(tensor).sum()) for tensor in tensors)
