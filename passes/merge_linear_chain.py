"""merge-linear-chain: merge adjacent linear layers into one linear layer."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import fx

from ampopt.ir.graph import (
    add_rounded,
    arguments,
    aten,
    calls,
    constant,
    copy_of,
    exact_constant,
    finish,
    is_constant,
    only_user,
    replace,
    where,
)
from ampopt.ir.numerics import is_finite_in, is_rounded, widened
from ampopt.ir.program import Program
from ampopt.ir.shapes import decides_by_values
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class MergeLinearChain(Pass):
    """Multiply adjacent linear layers out: `linear(linear(x, A, a), B, b)` -> `linear(x, B·A, B·a + b)`.

    Rewrites: two linear layers of which the second is the first one's only reader; chains of any length,
    pair by pair.
    Requires: A, a, B, b are weights of the graph (each bias may be missing), real or complex, stored in one
    dtype; A and B are matrices.
    Declines: other readers of the first; computed weights; integers, which wrap around; a vector as A or B;
    products that the dtype of B cannot hold; pairs with a bottleneck between them, where the product has more
    weights than both factors; all where an operator decides by values.
    Correct because: B·(A·x + a) + b = (B·A)·x + (B·a + b): matrix multiplication is associative and linear. A
    bias of another shape than its layer's features is broadcast before it is multiplied; that of one row is
    one number for each feature, whatever x is. The product is computed in float64 from the unrounded weights,
    carried on unrounded through the chain, and rounded once to the dtype of B: there is no rounding between
    the layers, which matters in lower precisions. That holds for numbers: NaN stays NaN, but infinities, of
    which A makes both signs and B then NaN, are multiplied by B·A alone, and a ReLU may make 0 of one.
    Verification reverts the pass where that reaches an output as a number; a comparison or `sign` would make
    another number of it, in too small a share of a large result.
    Cost: none; the product has at most as many weights as the factors.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.REWRITE
    portable = True

    def apply(self, program: Program) -> Result:
        """Merge from the front, so that a chain is merged into its last layer; see the class."""
        module, rewrites = copy_of(program.graph), 0
        declined: list[Declined] = []
        decides = functools.cache(lambda: decides_by_values(program))
        for second in calls(module, [aten.linear.default]):
            first = second.args[0]
            if not isinstance(first, fx.Node) or first.target is not aten.linear.default:
                continue
            if reason := _why_not(module, first, second):
                declined.append(Declined(second.name, reason))
                continue
            if (node := decides()) is not None:
                reason = f"{where(node)} may take another infinity, or none, for another value"
                declined.append(Declined(second.name, reason))
                continue
            if not _merge(module, first, second):
                declined.append(Declined(second.name, f"the dtype of {second.name} cannot hold the product"))
                continue
            rewrites += 1
        return Result(program.with_graph(finish(module)) if rewrites else program, rewrites, tuple(declined))


def _why_not(module: fx.GraphModule, first: fx.Node, second: fx.Node) -> str | None:
    if only_user(first) is not second:
        return f"{first.name} has other readers"
    if not all(node is None or is_constant(node) for node in (*first.args[1:], *second.args[1:])):
        return "one of the weights is computed"
    a, b = constant(module, first.args[1]), constant(module, second.args[1])
    assert a is not None
    assert b is not None
    if a.dtype is not b.dtype:
        return f"{first.name} is stored in another dtype"
    if not is_rounded(a):
        return "its weights are integers"
    if (a.dim(), b.dim()) != (2, 2):
        return "one of the weights is no matrix"
    if b.shape[0] * a.shape[1] > a.numel() + b.numel():
        return f"the product of {list(b.shape)} and {list(a.shape)} has more weights than both"
    return None


def _merge(module: fx.GraphModule, first: fx.Node, second: fx.Node) -> bool:
    """Merge two layers; False, and nothing is done, where a number of the product overflows."""
    inner, outer = arguments(first), arguments(second)
    a, b = exact_constant(module, inner["weight"]), exact_constant(module, outer["weight"])
    stored = constant(module, outer["weight"])
    assert a is not None
    assert b is not None
    assert stored is not None
    product, bias = widened(b) @ widened(a), exact_constant(module, outer["bias"])
    inner_bias = exact_constant(module, inner["bias"])
    if inner_bias is not None:
        shape = torch.broadcast_shapes(inner_bias.shape, a.shape[:1])
        shift = widened(inner_bias).broadcast_to(shape) @ widened(b).T
        bias = shift if bias is None else shift + widened(bias)
    if bias is not None and bias.shape[-1:] == b.shape[:1] == (bias.numel(),):
        bias = bias.reshape(-1)  # of one row, as which a layer of one feature takes no matrix
    if not all(new is None or is_finite_in(stored.dtype, new) for new in (product, bias)):
        return False
    second.args, second.kwargs = (inner["input"], outer["weight"], outer["bias"]), {}
    replace(first, second)  # before the new weights are made, which come from both
    weight_node = add_rounded(module, f"{second.name}_weight", product, stored.dtype, second)
    bias_node = None
    if bias is not None:
        bias_node = add_rounded(module, f"{second.name}_bias", bias, stored.dtype, second)
    second.args, second.kwargs = (inner["input"], weight_node, bias_node), {}
    return True
