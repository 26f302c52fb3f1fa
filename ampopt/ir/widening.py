"""Takes mixed precision out of a program again, for engines that round by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_aggregate

from ampopt.ir.graph import calls, copy_of, exact_constant, finish
from ampopt.ir.program import Border, Program


def widened(program: Program) -> Program:
    """The program of a mixed lane in float32: unrounded weights, and float32 where it has the lane's dtype.

    It computes the original's function. Its lane stays, and so does the error that the lane allows. Weights
    that the model itself stores in the lower precision are widened as they are.
    """
    low = program.lane.dtype
    module = copy_of(program.graph)
    for node in module.graph.find_nodes(op="get_attr"):
        if (weight := exact_constant(module, node)) is not None and getattr(module, node.target).dtype is low:
            module.register_buffer(node.target, weight.to(torch.float32))
            node.meta.pop("exact", None)

    def wide(value: Any) -> Any:
        return torch.float32 if value is low else value

    for node in calls(module):
        node.args = map_aggregate(node.args, wide)
        node.kwargs = map_aggregate(node.kwargs, wide)
    entry = tuple(Border(torch.float32) if each.dtype is low else each for each in program.entry)
    return program.with_graph(finish(module)).replace(entry=entry)
