"""fuse-conv-act: fuse convolution, bias, residual add and ReLU into one cuDNN kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.ir.graph import (
    arguments,
    aten,
    calls,
    computed_weight,
    constant,
    finish,
    gives_a_tensor,
    insert_call,
    only_user,
    replace,
    tensor_meta,
)
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result
from ampopt.kernels.cudnn_shapes import know_shapes

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class FuseConvAct(Pass):
    """Fuse into cuDNN's own operators: `relu(conv(x))` and `relu(conv(x) + z)` -> one kernel each.

    Rewrites: conv2d with constant weights, then ReLU, to `cudnn_convolution_relu`; conv2d, then an add of a
    tensor of the same shape, dtype and memory layout, then ReLU, to `cudnn_convolution_add_relu`.
    Requires: CUDA with cuDNN; float32, float16 or bfloat16 throughout; the convolution's only reader is the
    add or the ReLU, and the add's only reader is the ReLU.
    Declines: other readers; other dtypes; computed weights; inputs without a batch, or with an empty one; an
    operand that broadcasts or is laid out differently; an add with a factor; programs under autocast (the
    fused operators are not on its lists). With `keeps_nan`, a call for which cuDNN chooses a kernel whose
    ReLU turns NaN into a number (tested by running it).
    Correct because: the operators are defined as relu(conv(x, W, b)) and relu(conv(x, W, b) + α·z), here with
    α = 1; addition commutes, so either operand of the add may be the convolution. z is computed before the
    add and so before the fused call, which stands in the ReLU's place. Intermediate results stay in FP32
    registers, where the separate kernels round them: the fused result is the more exact one.
    Cost: none. Elsewhere, and in exported models, the plain form runs.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.KERNEL
    portable = False
    shape_dependent = True

    keeps_nan: bool = True

    def why_not(self, program: Program) -> str | None:
        """Declines other devices: the operators exist for CUDA only."""
        if program.device.type != "cuda":
            return "cuDNN's fused operators need CUDA"
        return "it still runs under autocast" if program.under_autocast else None

    def apply(self, program: Program) -> Result:
        """Match from the ReLU backwards, check, fuse; see the class."""
        know_shapes()
        module, rewrites = record_shapes(program), 0
        declined: list[Declined] = []
        for relu in calls(module, [aten.relu.default]):
            found = _match(relu)
            if found is None:
                continue
            conv, other = found
            reason = _why_not(conv, relu, other)
            is_tried = self.keeps_nan and program.device.type == "cuda"
            if reason is None and is_tried and _swallows_nan(program, module, conv, other):
                reason = "the kernel that cuDNN chooses for it makes numbers of NaN"
            if reason is not None:
                declined.append(Declined(relu.name, reason))
                continue
            _fuse(module, conv, relu, other)
            rewrites += 1
        return Result(program.with_graph(finish(module)) if rewrites else program, rewrites, tuple(declined))


def _match(relu: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """The convolution before a ReLU and what is added to it: (conv, None), (conv, z), or None."""
    source = relu.args[0]
    if not isinstance(source, fx.Node):
        return None
    if source.target is aten.conv2d.default:
        return source, None
    if source.target is not aten.add.Tensor:
        return None
    left, right = source.args[0], source.args[1]
    # of two convolutions the later one is fused, because the other must have run before it
    pairs = [
        (c, z) for c, z in ((right, left), (left, right)) if isinstance(c, fx.Node) and isinstance(z, fx.Node)
    ]
    convs = [(conv, z) for conv, z in pairs if conv.target is aten.conv2d.default]
    return next((pair for pair in convs if only_user(pair[0]) is source), convs[0] if convs else None)


def _why_not(conv: fx.Node, relu: fx.Node, other: fx.Node | None) -> str | None:
    reader = only_user(conv)
    if reader is None:
        return f"{conv.name} has other readers"
    if (name := computed_weight(conv)) is not None:
        return f"the {name} of {conv.name} is computed"
    if len(tensor_meta(conv).shape) != 4:
        return f"the input of {conv.name} has no batch"
    if 0 in tensor_meta(conv).shape:
        return f"{conv.name} is empty"
    if tensor_meta(conv).dtype not in _DTYPES:
        return f"cuDNN does not fuse {str(tensor_meta(conv).dtype).removeprefix('torch.')}"
    if other is None:
        return None
    if only_user(reader) is not relu:
        return f"{reader.name} has other readers"
    if arguments(reader)["alpha"] != 1:
        return f"{reader.name} multiplies its operand"
    if not gives_a_tensor(other):
        return f"{other.name} is a number"
    mine, theirs = tensor_meta(conv), tensor_meta(other)
    if (mine.shape, mine.dtype, mine.stride) != (theirs.shape, theirs.dtype, theirs.stride):
        return f"{other.name} differs from {conv.name} in shape, dtype or memory layout"
    return None


def _swallows_nan(program: Program, module: fx.GraphModule, conv: fx.Node, other: fx.Node | None) -> bool:
    """Whether the fused kernel gives numbers where the separate ones give NaN; one element of x is NaN."""
    own = arguments(conv)
    weight, bias = constant(module, own["weight"]), constant(module, own["bias"])
    x = _random_like(own["input"], program.device)
    x[tuple(size // 2 for size in x.shape)] = float("nan")
    z = None if other is None else _random_like(other, program.device)
    plain: tuple[Any, ...] = (x, weight, bias, *_border(own), own["groups"])
    with program.scope():
        expected = aten.conv2d.default(*plain)
        if z is None:
            found = aten.cudnn_convolution_relu.default(*plain)
        else:
            expected = expected + z
            found = aten.cudnn_convolution_add_relu.default(x, weight, z, 1.0, *plain[2:])
    return bool((expected.isnan() & ~found.isnan()).any())


def _random_like(node: fx.Node, device: torch.device) -> Tensor:
    meta, generator = tensor_meta(node), torch.Generator(device).manual_seed(0)
    numbers = torch.randn(meta.shape, generator=generator, device=device).to(meta.dtype)
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device).copy_(numbers)


def _border(own: Mapping[str, Any]) -> list[list[int]]:
    """Stride, padding and dilation, two numbers each."""
    values = [list(own[key]) for key in ("stride", "padding", "dilation")]
    return [each * 2 if len(each) == 1 else each for each in values]


def _fuse(module: fx.GraphModule, conv: fx.Node, relu: fx.Node, other: fx.Node | None) -> None:
    own = arguments(conv)
    border = _border(own)
    if other is None:
        call = (own["input"], own["weight"], own["bias"], *border, own["groups"])
        fused = insert_call(module, relu, aten.cudnn_convolution_relu.default, *call)
    else:
        call = (own["input"], own["weight"], other, 1.0, own["bias"], *border, own["groups"])
        fused = insert_call(module, relu, aten.cudnn_convolution_add_relu.default, *call)
    fused.meta["tensor_meta"] = relu.meta["tensor_meta"]  # a later match may add this result
    replace(relu, fused)
