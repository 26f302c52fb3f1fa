"""pure-half: an AMP lane's program without the islands of FP32 that autocast leaves in it."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from ampopt.casting import decide, lower_inputs, stays_in_fp32, write_casts
from ampopt.graph import aten, calls, dtype_of, finish, record_shapes, replace
from ampopt.program import Program
from ampopt.transform import Family, Numerics, Pass, Result

_FLOATING = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class PureHalf(Pass):
    """Compute in 16 bits what autocast computes in FP32: norms, softmax, residual sums.

    Rewrites: casts between the lane's dtype and FP32 are taken out, `dtype=` arguments that ask for FP32
    too; every operator gets its floating-point inputs in the lane's dtype, weights are stored in it.
    PyTorch's kernels for norms, softmax and sums still add up in FP32; what they read and write is half as
    wide.
    Requires: a program of an AMP lane whose precision is baked.
    Declines: where nothing is in FP32; where a part of the model has to stay in FP32 (recurrent layers,
    blocks that switch autocast off or cast to FP32 themselves).
    Correct because: it is another precision assignment of the same graph, as valid as autocast's where no
    value leaves the range of the dtype (65504 for float16): the verifier looks, on the user's inputs and on
    random ones, for errors above twice those of autocast.
    Cost: the range of FP32 in the residual stream.
    """

    numerics = Numerics.APPROXIMATE
    family = Family.PLACEMENT
    portable = False

    def why_not(self, program: Program) -> str | None:
        """Only baked programs of a 16-bit lane have islands."""
        if program.lane_dtype is torch.float32:
            return "the lane does not compute in mixed precision"
        if program.settings.autocast is not None:
            return "it still runs under autocast"
        kept = next((node for node in calls(program.graph) if stays_in_fp32(node) or _wants_fp32(node)), None)
        return f"{kept.name} has to stay in FP32" if kept is not None else None

    def apply(self, program: Program) -> Result:
        """Take casts out, cast what is left in FP32; see the class."""
        module = record_shapes(program)
        rewrites = _drop_casts(module, program.lane_dtype)
        decisions = decide("half", program, module, program.lane_dtype)
        entry = tuple(lower_inputs(module, decisions, program.entry))
        rewrites += write_casts(module, decisions)
        if not rewrites and entry == program.entry:
            return Result(program, 0)
        return Result(program.with_graph(finish(module)).replace(entry=entry), max(1, rewrites))


def _wants_fp32(node: fx.Node) -> bool:
    """Whether the model itself casts there; autocast's casts are written in another way."""
    return node.target is aten.to.dtype and node.args[1] is torch.float32


def _drop_casts(module: fx.GraphModule, low: torch.dtype) -> int:
    """Take out casts between floating-point dtypes, and the wish for results in FP32; count them."""
    count = 0
    for node in list(calls(module)):
        if _is_plain_cast(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            replace(node, source)
            count += 1
        elif node.all_input_nodes and node.kwargs.get("dtype") is torch.float32:
            node.update_kwarg("dtype", low)
            count += 1
    module.recompile()
    return count


def _is_plain_cast(node: fx.Node) -> bool:
    """A copy that changes nothing but the dtype, from one floating-point dtype to another."""
    if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and {dtype_of(source), node.kwargs["dtype"]} <= set(_FLOATING)
