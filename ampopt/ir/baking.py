"""Writes the casts that a mixed-precision policy decides into a graph, so that it needs no autocast."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import fx

from ampopt.errors import PassError
from ampopt.ir.casting import Decisions, decide, record_autocast, result_dtypes
from ampopt.ir.graph import (
    add_rounded,
    arguments,
    aten,
    calls,
    cast_for_readers,
    copy_of,
    finish,
    insert_call,
)
from ampopt.ir.narrow_convs import keep_narrow_convs_in_fp32
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.ir.program import Border, Program


@dataclasses.dataclass(frozen=True)
class Kept:
    """Calls, by their names, that no policy lowers.

    `dtypes` is the dtype that each of them computes in. `back` are the calls whose results are cast to the
    lane's dtype for all readers; the results of others stay as they are.
    """

    dtypes: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict)
    back: frozenset[str] = frozenset()

    def mark(self, module: fx.GraphModule, dtype: torch.dtype) -> None:
        """Mark the calls in a graph that may be edited; `dtype` is the lane's."""
        for node in calls(module):
            if node.name in self.dtypes:
                node.meta[FULL_PRECISION] = self.dtypes[node.name]
            if node.name in self.back:
                cast_for_readers(module, node, dtype)


NOTHING_KEPT = Kept()


def bake(program: Program, policy: str, kept: Kept = NOTHING_KEPT) -> tuple[Program, int]:
    """A program that runs under autocast, with the casts of `policy` in its graph; and their number.

    Raises PassError if the casts cannot give the result dtypes that autocast gives.
    """
    dtype = program.lane.dtype
    module = copy_of(program.graph)
    plain = program.replace(under_autocast=False)
    keep_narrow_convs_in_fp32(program, module)
    kept.mark(module, dtype)
    expected: dict[fx.Node, torch.dtype] = {}
    if policy == "amp":
        decisions, expected = record_autocast(plain, module, dtype)
    else:
        decisions = decide(policy, plain, module, dtype)
    expected_by_name = {node.name: want for node, want in expected.items() if node.op == "call_function"}
    entry = tuple(_lower_inputs(module, decisions, program))
    count = max(1, _cast_inputs(module, decisions))  # at the least, autocast itself is gone
    baked = plain.with_graph(finish(module)).replace(entry=entry)
    return _with_result_dtypes(baked, expected_by_name), count


def _lower_inputs(module: fx.GraphModule, decisions: Decisions, program: Program) -> list[Border]:
    """The borders of the inputs; one that every reader wants in the same other dtype enters in it.

    An input that is given in a dtype that one reader wants enters as it is, and is cast for the others.
    """
    borders = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, border, example in zip(placeholders, program.entry, program.examples, strict=True):
        wanted = {decisions.get(user, {}).get(node) for user in node.users}
        if len(wanted) > 1 and example.dtype in wanted:
            for user in node.users:
                decisions.setdefault(user, {}).setdefault(node, border.dtype)
            wanted = {example.dtype}
        if len(wanted) == 1 and (dtype := wanted.pop()) is not None:
            for user in node.users:
                if decisions[user][node] is dtype:
                    del decisions[user][node]
            border = dataclasses.replace(border, dtype=dtype)
        borders.append(border)
    return borders


def _cast_inputs(module: fx.GraphModule, decisions: Decisions) -> int:
    """Give each call its inputs as decided; count the inputs that changed."""
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    count = 0
    for node in calls(module):
        for source, dtype in decisions.get(node, {}).items():
            if (source, dtype) not in made:
                made[source, dtype] = _cast(module, source, dtype, first_reader=node)
            node.replace_input_with(source, made[source, dtype])
            count += 1
    return count


def _cast(module: fx.GraphModule, source: fx.Node, dtype: torch.dtype, first_reader: fx.Node) -> fx.Node:
    if source.op == "get_attr":
        weight = getattr(module, str(source.target))
        return add_rounded(module, f"{source.name}_{dtype}".replace("torch.", ""), weight, dtype, source)
    return insert_call(module, first_reader, aten._to_copy.default, source, dtype=dtype)


def _with_result_dtypes(program: Program, expected: dict[str, torch.dtype]) -> Program:
    """Set `dtype=` on operators whose result autocast asks for in another dtype than they give."""
    if not expected:
        return program
    module = copy_of(program.graph)
    for _ in range(2):  # the second run proves the first run's repairs
        got = {n.name: d for n, d in result_dtypes(program, module).items()}
        wrong = [n for n in calls(module) if n.name in expected and got.get(n.name) is not expected[n.name]]
        if not wrong:
            return program.with_graph(finish(module))
        for node in wrong:
            if isinstance(node.target, torch._ops.OpOverload) and "dtype" in arguments(node):
                node.update_kwarg("dtype", expected[node.name])
        module.recompile()
    names = ", ".join(node.name for node in wrong[:3])
    raise PassError(f"autocast gives {names} another result dtype than casts of their inputs can")
