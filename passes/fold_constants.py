"""fold-constants: compute once what depends on no input."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ampopt.ir.graph import add_constant, calls, copy_of, draws_random_numbers, finish, own_outputs, replace
from ampopt.ir.own_autocast import own_scope
from ampopt.ir.pass_options import option
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result

SMALL = torch.iinfo(torch.int16).max
"""A result of at most so many numbers is folded whatever it is made from."""


@dataclasses.dataclass(frozen=True)
class FoldConstants(Pass):
    """Compute once what depends on no input: `f(w)` -> `w'`, `f(zeros(2, 3))` -> `w'`.

    Rewrites: every operator whose tensor arguments are weights of the graph, or were computed from nothing
    else, becomes a weight: whole chains fold (`weight_norm`, casts of weights, position embeddings that
    start with `arange` or `zeros`). A constant that the model makes on the CPU and copies to its device,
    which no CUDA graph can capture, is on the device from then on.
    Declines: operators that return several tensors (what takes one of them folds) or none, results that are
    themselves outputs of the model, and results that are too large: over `max_growth` times as large as what
    they are made from and over `most_bytes`, or views of that growth (an `expand`), which cost nothing.
    Correct because: the graph is functional, and operators that draw random numbers or leave memory
    uninitialized are left alone, so an operator on constants gives the same value in every call; the value
    computed here is the one that each call would compute.
    Cost: the memory of the results.
    """

    numerics = Numerics.BITWISE
    family = Family.REWRITE
    portable = True
    enables_others = True

    max_growth: int = option(4, 1, 10**9)
    most_bytes: int = option(2**22, 0, 2**50)

    def apply(self, program: Program) -> Result:
        """Fold in graph order; see the class."""
        module, rewrites = copy_of(program.graph), 0
        known: dict[fx.Node, Any] = _weights(module)
        kept: dict[fx.Node, str] = {}
        for node in calls(module):
            if not _is_function(node) or any(operand not in known for operand in node.all_input_nodes):
                continue
            with program.scope(), own_scope(node, program.device):
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                result = node.target(*args, **kwargs)  # type: ignore[operator]
            if reason := self._why_keep(node, result, known):
                known[node], kept[node] = result, reason
                continue
            folded = add_constant(module, node.name, result.clone(), node)
            known[folded] = getattr(module, str(folded.target))
            replace(node, folded)
            rewrites += 1
        own_outputs(module)  # a view of what is a weight now
        if not rewrites:
            return Result(program, 0, _declined(module, kept))
        module = finish(module)
        return Result(program.with_graph(module), rewrites, _declined(module, kept))

    def _why_keep(self, node: fx.Node, result: object, known: Mapping[fx.Node, Any]) -> str | None:
        if not isinstance(result, Tensor):
            return "it returns several tensors"
        if any(user.op == "output" for user in node.users):
            return "it is an output of the model"
        operands = [tensor for operand in node.all_input_nodes for tensor in _tensors(known[operand])]
        is_view = any(_storage(result) == _storage(operand) for operand in operands)
        most = max(self.max_growth * max((operand.numel() for operand in operands), default=0), SMALL)
        if result.numel() <= most or (not is_view and result.nbytes <= self.most_bytes):
            return None
        if not operands:
            return f"it takes over {self.most_bytes} bytes"
        return f"its result is over {self.max_growth} times as large as its operands"


def _weights(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """The tensors that the graph owns, by the nodes that read them."""
    found = {node: getattr(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr"}
    return {node: value for node, value in found.items() if isinstance(value, Tensor)}


def _is_function(node: fx.Node) -> bool:
    """Whether a call gives the same for the same arguments."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    return "empty" not in node.target._schema.name and not draws_random_numbers(node)


def _tensors(value: object) -> list[Tensor]:
    """The tensors of a result that is one or several."""
    several = value if isinstance(value, Sequence) else (value,)
    return [each for each in several if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's memory; of a sparse one, which has several, that of the object."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _declined(module: fx.GraphModule, kept: Mapping[fx.Node, str]) -> tuple[Declined, ...]:
    """What was left in the graph, with the reasons; not what nothing reads any more."""
    alive = set(module.graph.nodes)
    return tuple(Declined(node.name, reason) for node, reason in kept.items() if node in alive and node.users)
