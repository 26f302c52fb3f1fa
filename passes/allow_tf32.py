"""allow-tf32: use Tensor Cores for FP32 convolutions and matrix products, with 10 bits of mantissa."""

from __future__ import annotations

import dataclasses

import torch

from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class AllowTf32(Pass):
    """Let CUDA round the FP32 inputs of convolutions and matrix products to TF32 (10 bits of mantissa).

    Rewrites: the program's settings. The switch is set for the program's own calls (or its capture) and
    restored after them; no global flag stays on.
    Requires: FP32 lane, and a tolerance from the user: without one the pass would change the lane's precision
    without the user's consent.
    Declines: other lanes; CPUs; GPUs before Ampere (compute capability 8.0), which have no TF32.
    Correct because: products of rounded inputs are accumulated in FP32; the relative error of each input is
    at most 2^-11, and the verification against float64 decides.
    Cost: precision.
    """

    numerics = Numerics.APPROXIMATE
    family = Family.PLACEMENT
    portable = False

    def why_not(self, program: Program) -> str | None:
        """Only FP32 programs on Ampere or later can use it."""
        if program.lane.is_mixed:
            return "the lane already computes in a lower precision"
        if program.device.type != "cuda":
            return "TF32 is a format of NVIDIA's Tensor Cores"
        if torch.cuda.get_device_capability(program.device) < (8, 0):
            return "this GPU has no TF32 (compute capability below 8.0)"
        return None

    def apply(self, program: Program) -> Result:
        """Set the switch in the program's settings."""
        if program.settings.tf32:
            return Result(program, 0)
        settings = dataclasses.replace(program.settings, tf32=True)
        return Result(program.replace(settings=settings), 1)
