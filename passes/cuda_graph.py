"""cuda-graph: launch the whole program as one captured CUDA graph."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from ampopt.graph import calls
from ampopt.program import Program
from ampopt.transform import Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class CudaGraph(Pass):
    """Capture all launches of the program once and replay them with a single call.

    Rewrites: the way the program is launched; `ampopt.runtime` captures a graph for each input shape.
    Requires: CUDA; every operator runs on the device without waiting for the host.
    Declines: CPUs; graphs with an operator whose result's shape depends on data, or that reads a value back
    to the host, because neither can be captured.
    Correct because: a replay launches the same kernels with the same arguments in the same order; inputs are
    copied into the buffers that were captured, and outputs out of them before the next call.
    Cost: the memory of the captured run stays allocated; one copy of inputs and outputs.
    """

    numerics = Numerics.BITWISE
    family = Family.LAUNCH
    portable = False

    def why_not(self, program: Program) -> str | None:
        """What cannot be captured, by the operators' own tags."""
        if program.device.type != "cuda":
            return "there is no CUDA device"
        found = next((node for node in calls(program.graph) if _waits_for_host(node)), None)
        return f"{found.name} needs a value on the host" if found is not None else None

    def apply(self, program: Program) -> Result:
        """Mark the program as captured."""
        return Result(program.replace(cuda_graph=True), 0 if program.cuda_graph else 1)


def _waits_for_host(node: fx.Node) -> bool:
    overload = node.target
    if not isinstance(overload, torch._ops.OpOverload):
        return False
    return torch.Tag.data_dependent_output in overload.tags or torch.Tag.dynamic_output_shape in overload.tags
