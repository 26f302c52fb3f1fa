"""fold-constants: compute once what depends on weights alone."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, fx

from ampopt.ir.graph import add_constant, calls, copy_of, finish, is_constant, own_outputs, replace
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class FoldConstants(Pass):
    """Compute once what depends on weights alone: `f(w)` -> `w'`.

    Rewrites: every operator whose tensor arguments are all weights of the graph becomes a weight, in
    order, so that whole chains fold (`weight_norm`, other parametrizations, casts of weights).
    Declines: operators that return several tensors or none, results that are themselves outputs of the
    model, and results over `max_growth` times as large as what they are made from (an `expand`).
    Correct because: the graph is functional and draws no random numbers, so an operator on constants gives
    the same value in every call; the value computed here is the one that each call would compute.
    Cost: the memory of the results.
    """

    numerics = Numerics.BITWISE
    family = Family.REWRITE
    portable = True
    enables_others = True

    max_growth: int = 4

    def apply(self, program: Program) -> Result:
        """Fold in graph order; see the class."""
        module, rewrites = copy_of(program.graph), 0
        declined: list[Declined] = []
        for node in calls(module):
            operands = node.all_input_nodes
            if not operands or not all(is_constant(operand) for operand in operands):
                continue
            values: dict[fx.Node, Tensor] = {n: getattr(module, str(n.target)) for n in operands}
            with program.scope():
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n, v=values: v[n])  # type: ignore[misc]
                result = node.target(*args, **kwargs)  # type: ignore[operator]
            if reason := self._why_keep(node, result, values):
                declined.append(Declined(node.name, reason))
                continue
            replace(node, add_constant(module, node.name, result.clone(), node))
            rewrites += 1
        own_outputs(module)  # a view of what is a weight now
        return Result(program.with_graph(finish(module)) if rewrites else program, rewrites, tuple(declined))

    def _why_keep(self, node: fx.Node, result: object, values: dict[fx.Node, Tensor]) -> str | None:
        if not isinstance(result, Tensor):
            return "it returns several tensors"
        if any(user.op == "output" for user in node.users):
            return "it is an output of the model"
        largest = max(value.numel() for value in values.values())
        if result.numel() > max(self.max_growth * largest, torch.iinfo(torch.int16).max):
            return f"its result is over {self.max_growth} times as large as its operands"
        return None
