"""fuse-linear-act: fuse a linear layer and its ReLU into one cuBLASLt kernel."""

from __future__ import annotations

import dataclasses
import math

from torch import fx

from ampopt.ir.graph import (
    add_constant,
    aten,
    calls,
    constant,
    finish,
    insert_call,
    is_constant,
    only_user,
    replace,
    shape_of,
)
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class FuseLinearAct(Pass):
    """Fuse into cuBLASLt's epilogue: `relu(linear(x, W, b))` -> one kernel.

    Rewrites: linear with constant weights and a bias, whose only reader is a ReLU, to ATen's
    `_addmm_activation`; inputs of more than two dimensions are flattened before and restored after.
    Requires: CUDA. Declines: a missing bias, or one of another shape than the features; a vector as a weight;
    other readers; computed weights; programs under autocast.
    Correct because: the operator is defined as relu(b + x·Wᵀ) on matrices, and linear treats all leading
    dimensions as rows. The activation is applied to the accumulator before it is rounded to the output's
    dtype; rounding is monotonic and keeps zero, so ReLU before and after rounding are equal.
    Cost: none.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.KERNEL
    portable = False
    shape_dependent = True

    def why_not(self, program: Program) -> str | None:
        """Declines other devices: the epilogue exists in cuBLASLt only."""
        if program.device.type != "cuda":
            return "cuBLASLt's fused epilogues need CUDA"
        return "it still runs under autocast" if program.under_autocast else None

    def apply(self, program: Program) -> Result:
        """Match, check, fuse; see the class."""
        module, rewrites = record_shapes(program), 0
        declined: list[Declined] = []
        for relu in calls(module, [aten.relu.default]):
            linear = relu.args[0]
            if not isinstance(linear, fx.Node) or linear.target is not aten.linear.default:
                continue
            if reason := _why_not(module, linear, relu):
                declined.append(Declined(relu.name, reason))
                continue
            _fuse(module, linear, relu)
            rewrites += 1
        return Result(program.with_graph(finish(module)) if rewrites else program, rewrites, tuple(declined))


def _why_not(module: fx.GraphModule, linear: fx.Node, relu: fx.Node) -> str | None:
    if only_user(linear) is not relu:
        return f"{linear.name} has other readers"
    if len(linear.args) < 3 or linear.args[2] is None:
        return f"{linear.name} has no bias"
    if not all(is_constant(node) for node in linear.args[1:]):
        return "one of the weights is computed"
    weight, bias = (constant(module, node) for node in linear.args[1:])
    assert weight is not None
    assert bias is not None
    if weight.dim() != 2 or bias.shape != weight.shape[:1]:
        return "its weight is no matrix, or its bias not one number for each feature"
    return None


def _fuse(module: fx.GraphModule, linear: fx.Node, relu: fx.Node) -> None:
    source, weight_node, bias = linear.args[:3]
    assert isinstance(source, fx.Node)
    weight = constant(module, weight_node)
    assert weight is not None
    transposed = add_constant(module, f"{linear.name}_weight_t", weight.t(), linear)
    shape = shape_of(source)
    rows = source
    if len(shape) != 2:
        flat = [math.prod(shape[:-1]), shape[-1]]
        rows = insert_call(module, relu, aten.reshape.default, source, flat)
    fused = insert_call(module, relu, aten._addmm_activation.default, bias, rows, transposed)
    if len(shape) != 2:
        fused = insert_call(module, relu, aten.reshape.default, fused, [*shape[:-1], weight.shape[0]])
    fused.meta["tensor_meta"] = relu.meta["tensor_meta"]  # the next layer reads this
    replace(relu, fused)
