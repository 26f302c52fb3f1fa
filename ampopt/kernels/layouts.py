"""Converts programs to channels_last (feature maps with the channel innermost)."""

from __future__ import annotations

from ampopt.ir.graph import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    add_constant,
    calls,
    constant,
    copy_of,
    finish,
    is_constant,
)
from ampopt.ir.program import CHANNELS_LAST, Border, Program
from ampopt.ir.results_apart import keep_results_apart
from ampopt.ir.transform import Declined, Result


def in_channels_last(program: Program) -> Result:
    """Convert convolution weights and image inputs to channels_last; see pass `channels-last`."""
    module, rewrites, ranks, moved = copy_of(program.graph), 0, set[int](), False
    declined: list[Declined] = []
    for node in calls(module, CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS):
        if not is_constant(node.args[1]):
            declined.append(Declined(node.name, "its weight is computed"))
            continue
        weight = constant(module, node.args[1])
        if weight is None or weight.dim() not in CHANNELS_LAST:
            continue
        ranks.add(weight.dim())
        moved |= not weight.is_contiguous(memory_format=CHANNELS_LAST[weight.dim()])
        packed = weight.contiguous(memory_format=CHANNELS_LAST[weight.dim()])
        new = add_constant(module, f"{node.name}_weight", packed, node)
        node.args = (node.args[0], new, *node.args[2:])
        rewrites += 1
    if not rewrites:
        return Result(program, 0, tuple(declined))
    entry = tuple(
        Border(border.dtype, CHANNELS_LAST[example.dim()] if example.dim() in ranks else border.memory_format)
        for border, example in zip(program.entry, program.examples, strict=True)
    )
    if entry == program.entry and not moved:
        return Result(program, 0, tuple(declined))
    keep_results_apart(program, module)
    changed = program.with_graph(finish(module)).replace(entry=entry)
    return Result(changed, rewrites, tuple(declined))
