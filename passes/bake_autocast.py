"""bake-autocast: write mixed-precision casts into the graph, so that autocast is not needed in each call."""

from __future__ import annotations

import dataclasses

from ampopt.errors import PassError
from ampopt.ir.baking import bake
from ampopt.ir.casting import POLICIES
from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class BakeAutocast(Pass):
    """Write mixed precision into the graph: `op(x, w)` under autocast -> `op(cast(x), w')`.

    Rewrites: each operator gets its inputs in the dtype that the policy (`amp`, `O1`, `O2`, `half`) decides:
    weights are stored in it, model inputs that are only read in it, or given in it, enter in it, and a
    result is cast once for all its readers.
    Requires: a program of an AMP lane that still runs under autocast.
    Declines: other programs. Recurrent layers, operators made of others whose result dtypes no casts of their
    inputs give (on a CPU, recurrent cells), parts that the model excludes from autocast
    (`torch.autocast(..., enabled=False)`), and on a CPU the convolutions that PyTorch computes wrongly below
    FP32 (`ampopt.ir.narrow_convs`, whose results are cast) stay in FP32, or in their weights' dtype; the
    graph's own casts do not change.
    Correct because: for `amp`, the graph is run once under autocast itself and every cast of an operator's
    input is noted; the shapes are constants and the graph has no control flow, so every later call would make
    the same casts. Where autocast asks an operator for another result dtype (softmax in FP32), its `dtype`
    argument says so; the result dtypes are compared with autocast's afterwards, and any difference is an
    error. The other policies choose casts by operator; each is a valid precision assignment. Outputs are
    returned in the original model's dtypes.
    Cost: a copy of the weights in the lower precision; the unrounded ones are kept for passes that compute
    new weights from them.
    """

    numerics = Numerics.APPROXIMATE
    family = Family.PLACEMENT
    portable = False
    enables_others = True

    policy: str = "amp"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise PassError(f"unknown precision policy {self.policy!r}: choose from {', '.join(POLICIES)}")

    def why_not(self, program: Program) -> str | None:
        """Declines programs that do not run under autocast."""
        if program.under_autocast:
            return None
        if program.lane.is_mixed:
            return "the lane's precision is in the graph already"
        return "the lane does not compute in mixed precision"

    def apply(self, program: Program) -> Result:
        """Choose dtypes, insert casts, compare the result dtypes with autocast's; see the class."""
        return Result(*bake(program, self.policy))
