"""cuda-graph: launch the whole program as one captured CUDA graph."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from ampopt.engines.graph_capture import may_have_other_plans
from ampopt.ir.graph import aten, calls, dtype_of
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class CudaGraph(Pass):
    """Capture all launches of the program once and replay them with a single call.

    Rewrites: the way the program is launched; `ampopt.deploy.runtime` captures a graph for each input shape,
    and `ampopt.engines.graph_per_size` one for each size of a program for a range that comes back.
    Requires: CUDA; every operator runs on the device without waiting for the host.
    Declines: CPUs; graphs with an operator whose result's shape depends on data, or that reads a value back
    to the host, because neither can be captured.
    Correct because: a replay launches the same kernels with the same arguments in the same order, but for the
    addresses of inputs and outputs, which are changed to the caller's; that this is right is tried once.
    Where cuDNN's algorithms are searched, or were in this thread, the capture finds its own, which may round
    differently than those before it.
    Cost: the memory of the captured run stays allocated.
    """

    numerics = Numerics.BITWISE
    family = Family.LAUNCH
    portable = False

    def numerics_on(self, program: Program) -> Numerics:
        """Bitwise, unless the capture selects cuDNN algorithms again."""
        return Numerics.REASSOCIATED if may_have_other_plans(program) else self.numerics

    def why_not(self, program: Program) -> str | None:
        """Declines operators that cannot be captured, by their tags."""
        if program.device.type != "cuda":
            return "there is no CUDA device"
        suspects = [node.name for node in calls(program.graph) if _may_wait_for_host(node)]
        if not suspects:
            return None
        shaped = [node for node in calls(record_shapes(program)) if node.name in suspects]
        found = next((node for node in shaped if not _is_plain_indexing(node)), None)
        return f"{found.name} needs a value on the host" if found is not None else None

    def apply(self, program: Program) -> Result:
        """Set the program to be launched as a CUDA graph."""
        if program.cuda_graph:
            return Result(program, 0)
        return Result(program.replace(cuda_graph=True), 1)


def _may_wait_for_host(node: fx.Node) -> bool:
    overload = node.target
    if not isinstance(overload, torch._ops.OpOverload):
        return False
    return torch.Tag.data_dependent_output in overload.tags or torch.Tag.dynamic_output_shape in overload.tags


def _is_plain_indexing(node: fx.Node) -> bool:
    """Indexing by integers; only masks have to be counted on the host first."""
    if node.target is not aten.index.Tensor:
        return False
    indices = [index for index in node.all_input_nodes if index is not node.args[0]]
    return all(dtype_of(index) not in (torch.bool, torch.uint8) for index in indices)
