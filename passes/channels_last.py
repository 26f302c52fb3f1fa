"""channels-last: keep feature maps in memory with the channel innermost."""

from __future__ import annotations

import dataclasses

from ampopt.graph import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    add_constant,
    calls,
    constant,
    copy_of,
    finish,
    is_constant,
    reads_strides,
)
from ampopt.program import CHANNELS_LAST, Border, Program
from ampopt.transform import Declined, Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class ChannelsLast(Pass):
    """Lay out convolution weights and image inputs with the channel innermost (NCHW -> NHWC in memory).

    Rewrites: the weight of every 2d and 3d convolution, and the format in which 4d and 5d inputs enter the
    graph. Operators between them hand the format on by themselves, so no permutes are inserted; the
    runtime changes the input's layout in the copy that it makes anyway. What the caller gets stays
    contiguous, as the original's outputs are; the copy out sees to it, and is timed with the rest.
    Requires: no operator that reads memory by strides (`as_strided`, `view_as_real`).
    Declines: convolutions whose weight is computed; programs with no 2d or 3d convolution.
    Correct because: a memory format is only the order of elements in memory. Every ATen operator but those
    excluded is defined on logical indices, and `lowering` has turned `view`, which refuses some layouts, into
    `reshape`, which does not. Kernels for the other layout may sum in another order.
    Cost: one copy of the weights; convolutions that have no good kernel for it, which is why it is timed.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.PLACEMENT
    portable = False

    def why_not(self, program: Program) -> str | None:
        """Programs that read memory by strides keep their layout."""
        found = reads_strides(program.graph)
        return f"{found.name} reads memory by its strides" if found is not None else None

    def apply(self, program: Program) -> Result:
        """Convert weights and input borders; see the class."""
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
            Border(
                border.dtype, CHANNELS_LAST[example.dim()] if example.dim() in ranks else border.memory_format
            )
            for border, example in zip(program.entry, program.examples, strict=True)
        )
        if entry == program.entry and not moved:
            return Result(program, 0, tuple(declined))
        changed = program.with_graph(finish(module)).replace(entry=entry)
        return Result(changed, rewrites, tuple(declined))
