"""A rewrite that tests plant, in a file of its own: a process that is given one loads little besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampopt.ir.graph import copy_of, finish, insert_call
from ampopt.ir.program import Program


def rewritten(program: Program, target: Callable[..., Any], *operands: Any) -> Program:
    """The program with its first output put through one more operator."""
    module = copy_of(program.graph)
    output = module.graph.output_node()
    first = output.all_input_nodes[0]
    output.replace_input_with(first, insert_call(module, output, target, first, *operands))
    return program.with_graph(finish(module))
