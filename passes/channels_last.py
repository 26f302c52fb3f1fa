"""channels-last: keep feature maps in memory with the channel innermost."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from ampopt.ir.graph import arguments, aten, calls, constant, is_constant, reads_strides, where
from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Numerics, Pass, Result
from ampopt.kernels.layouts import in_channels_last


@dataclasses.dataclass(frozen=True)
class ChannelsLast(Pass):
    """Lay out convolution weights and image inputs with the channel innermost (NCHW -> NHWC in memory).

    Rewrites: the weight of every 2d and 3d convolution, and the format in which 4d and 5d inputs enter the
    graph. Operators between them propagate the format, so no permutes are inserted; the runtime changes the
    input's layout in the copy that it makes anyway. The caller's outputs stay contiguous, as the original's
    are; the copy of the outputs converts them, and is included in the timing.
    Requires: no operator that reads memory by strides (`as_strided`, `view_as_real`).
    Declines: convolutions whose weight is computed; programs with no 2d or 3d convolution, or, on a CPU, with
    a 3d one in bfloat16 of groups, for which PyTorch 2.15 gives wrong numbers in this format, or of one
    channel, for which PyTorch 2.14 reads memory that nothing has written.
    Correct because: a memory format is only the order of elements in memory. Every ATen operator but those
    excluded is defined on logical indices, and `lowering` has turned `view`, which refuses some layouts, into
    `reshape`, which does not. Whether that copies depends on the layout: results that were copies, and may
    now be views of one memory, are copied. Kernels for the other layout may sum in another order.
    Cost: one copy of the weights. Some convolutions have no fast kernel for this format, so the pass is
    timed.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.PLACEMENT
    portable = False

    def why_not(self, program: Program) -> str | None:
        """Declines programs that read memory by strides."""
        found = reads_strides(program.graph)
        if found is not None:
            return f"{where(found)} reads memory by its strides"
        if program.device.type != "cpu":
            return None
        deep = calls(program.graph, [aten.conv3d.default, aten.conv3d.padding])
        wrong = next((where(node) for node in deep if _is_wrong(program, node)), None)
        return f"PyTorch computes {wrong} wrongly in this format" if wrong is not None else None

    def apply(self, program: Program) -> Result:
        """Convert weights and the formats of inputs; see the class."""
        return in_channels_last(program)


def _is_wrong(program: Program, node: fx.Node) -> bool:
    own = arguments(node)
    weight = constant(program.graph, own["weight"]) if is_constant(own["weight"]) else None
    is_low = torch.bfloat16 in (program.lane.dtype, None if weight is None else weight.dtype)
    return is_low and (own["groups"] > 1 or weight is None or weight.shape[1] == 1)
