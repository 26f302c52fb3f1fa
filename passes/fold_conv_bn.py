"""fold-conv-bn: fold batch normalization with running statistics into the layer before it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, fx

from ampopt.ir.graph import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    add_rounded,
    arguments,
    aten,
    calls,
    constant,
    copy_of,
    dtype_of,
    exact_constant,
    finish,
    is_constant,
    only_user,
    replace,
    shape_of,
)
from ampopt.ir.numerics import is_finite_in
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result

_RANKS: dict[object, int] = {aten.linear.default: 2}
_RANKS |= {op: dims + 2 for op, dims in (CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS).items()}
"""Rank of the output in which dimension 1 is the layer's output channel, the one that BN normalizes."""


@dataclasses.dataclass(frozen=True)
class FoldConvBn(Pass):
    """Fold batch normalization into the layer before it: `bn(conv(x, W, b))` -> `conv(x, W', b')`.

    Rewrites: conv1d/2d/3d, conv_transpose1d/2d/3d (any stride, groups, dilation; with bias or without) and
    linear, followed by batch_norm with running statistics, affine or not.
    Requires: W, b and the normalization's four tensors are weights of the graph; the normalization is the
    layer's only reader; it works on dimension 1 of an output of the layer's usual rank (so that a linear
    layer's features, or an unbatched convolution's channels, are not mistaken for another dimension), and
    returns the layer's dtype.
    Declines: batch statistics; no running statistics; other readers; computed weights; other ranks; a vector
    as a linear layer's weight, whose one feature is no dimension of the output; other dtypes; W' or b' that
    the dtype of W cannot hold (the variance of a dead channel is 0).
    Correct because: with s = γ / √(σ² + ε) for each output channel, bn(W ∗ x + b) = s · (W ∗ x) + s · (b - μ)
    + β, and convolution is linear in W, so W' = s · W along the output channel and b' = s · (b - μ) + β. The
    output channel is dimension 0 of W; a transposed convolution's W is [in, out / groups, *kernel], and its
    channel o belongs to group o // (out / groups), whose inputs are that group's slice of dimension 0. The
    new weights are new constants, so a layer that is called twice is folded for each call by itself.
    Computed in float64 from the unrounded weights and stored in the dtype of W. Cost: none.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.REWRITE
    portable = True
    enables_others = True

    def apply(self, program: Program) -> Result:
        """Match, check, fold; see the class."""
        module, rewrites = copy_of(program.graph), 0
        declined: list[Declined] = []
        shapes = _shapes(program)
        for norm in calls(module, [aten.batch_norm.default]):
            layer = norm.args[0]
            if not isinstance(layer, fx.Node) or layer.target not in _RANKS:
                continue
            if reason := _why_not(norm, layer, shapes):
                declined.append(Declined(norm.name, reason))
                continue
            if not _fold(module, layer, norm):
                reason = f"the dtype of {layer.name} cannot hold the folded weights"
                declined.append(Declined(norm.name, reason))
                continue
            rewrites += 1
        return Result(program.with_graph(finish(module)) if rewrites else program, rewrites, tuple(declined))


def _shapes(program: Program) -> dict[str, fx.Node]:
    """The layers and normalizations by name, knowing their shapes and dtypes."""
    if not any(True for _ in calls(program.graph, [aten.batch_norm.default])):
        return {}
    recorded = record_shapes(program)
    return {node.name: node for node in calls(recorded, [*_RANKS, aten.batch_norm.default])}


def _why_not(norm: fx.Node, layer: fx.Node, shapes: dict[str, fx.Node]) -> str | None:
    bn, own = arguments(norm), arguments(layer)
    if bn["training"]:
        return "it normalizes with the statistics of the batch"
    if bn["running_mean"] is None or bn["running_var"] is None:
        return "it has no running statistics"
    if only_user(layer) is not norm:
        return f"{layer.name} has other readers, which need it as it is"
    tensors = [bn[k] for k in ("weight", "bias", "running_mean", "running_var")] + [
        own["weight"],
        own["bias"],
    ]
    if not all(t is None or is_constant(t) for t in tensors):
        return "one of its weights is computed"
    rank = len(shape_of(shapes[layer.name]))
    if rank != _RANKS[layer.target]:
        return f"{layer.name} has {rank} dimensions: dimension 1 is not its output channel"
    if len(shape_of(arguments(shapes[layer.name])["weight"])) != rank:
        return f"the weight of {layer.name} is a vector: it has one feature, which is no dimension"
    if dtype_of(shapes[layer.name]) is not dtype_of(shapes[norm.name]):
        return f"it gives another dtype than {layer.name}"
    return None


def _fold(module: fx.GraphModule, layer: fx.Node, norm: fx.Node) -> bool:
    """Fold a normalization; False, and nothing is done, where a folded weight overflows."""
    own = arguments(layer)
    stored, weight = constant(module, own["weight"]), exact_constant(module, own["weight"])
    assert stored is not None
    assert weight is not None
    scale, shift = _scale_and_shift(module, norm)
    bias = exact_constant(module, own["bias"])
    new_bias = shift if bias is None else shift + bias.double() * scale
    groups = own["groups"] if layer.target in TRANSPOSED_CONVOLUTIONS else None
    new_weight = weight.double() * _along_output_channel(scale, weight, groups)
    if not all(is_finite_in(stored.dtype, exact) for exact in (new_weight, new_bias)):
        return False
    parameters = [p.name for p in layer.target._schema.arguments]  # type: ignore[union-attr]
    replace(norm, layer)  # first: the new weights come from both
    own["weight"] = add_rounded(module, f"{norm.name}_weight", new_weight, stored.dtype, layer)
    own["bias"] = add_rounded(module, f"{norm.name}_bias", new_bias, stored.dtype, layer)
    layer.args, layer.kwargs = tuple(own[name] for name in parameters), {}
    return True


def _scale_and_shift(module: fx.GraphModule, norm: fx.Node) -> tuple[Tensor, Tensor]:
    """s = γ / √(σ² + ε) and β - s · μ, in float64."""
    bn = arguments(norm)
    mean, variance, gamma, beta = (
        exact_constant(module, bn[key]) for key in ("running_mean", "running_var", "weight", "bias")
    )
    assert mean is not None
    assert variance is not None
    scale = torch.rsqrt(variance.double() + bn["eps"])
    scale = scale if gamma is None else scale * gamma.double()
    shift = -mean.double() * scale
    return scale, shift if beta is None else shift + beta.double()


def _along_output_channel(scale: Tensor, weight: Tensor, groups: int | None) -> Tensor:
    """`scale` shaped to multiply `weight`; `groups` is given for transposed convolutions."""
    kernel = (1,) * (weight.dim() - 2)
    if groups is None:
        return scale.reshape(-1, 1, *kernel)
    by_group = scale.reshape(groups, 1, -1).expand(groups, weight.shape[0] // groups, -1)
    return by_group.reshape(weight.shape[0], weight.shape[1], *kernel)
