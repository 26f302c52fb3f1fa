"""channels-last: keep feature maps in memory with the channel innermost."""

from __future__ import annotations

import dataclasses

from ampopt.graph import reads_strides
from ampopt.layouts import in_channels_last
from ampopt.program import Program
from ampopt.transform import Family, Numerics, Pass, Result


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
        return in_channels_last(program)
