"""fuse-conv-onednn: fuse convolutions with a residual add or activation into one oneDNN kernel each."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.ir.graph import (
    add_constant,
    arguments,
    aten,
    calls,
    computed_weight,
    constant,
    dtype_of,
    finish,
    gives_a_tensor,
    insert_call,
    only_user,
    replace,
    shape_of,
    tensor_meta,
)
from ampopt.ir.program import Program
from ampopt.ir.results_apart import keep_results_apart
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result

_UNARY = {
    aten.hardswish.default: "hardswish",
    aten.silu.default: "swish",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
}
"""Activations without parameters, and oneDNN's names for them in PyTorch's operators.

ReLU and hardsigmoid are not among them: oneDNN computes them by a maximum that makes numbers of NaN. As a
call of its own, on what the convolution has just left in the cache, a ReLU takes no longer that one can see.
"""


@dataclasses.dataclass(frozen=True)
class _Chain:
    """A convolution and what is fused behind it: `last` is the node that the fused call replaces."""

    conv: fx.Node
    last: fx.Node
    other: fx.Node | None = None
    activation: str = "none"


@dataclasses.dataclass(frozen=True)
class FuseConvOnednn(Pass):
    """Pack and fuse on CPUs: `act(conv(x, W, b))` and `conv(x, W, b) + z` -> one oneDNN kernel each.

    Rewrites: conv2d with constant weights to PyTorch's `mkldnn::_convolution_pointwise`, its weight packed
    once in the layout that the kernel wants for the program's shapes; with it a following hardswish, SiLU,
    sigmoid or tanh, or an add of a tensor of the same shape and dtype. A ReLU or hardsigmoid stays a separate
    operator, because oneDNN's lose NaN.
    Requires: a CPU with oneDNN; float32 or bfloat16; what is fused reads only the convolution (and z).
    Declines: computed weights, unbatched inputs, other dtypes, bfloat16 on a processor without it; an add
    with a factor, of another shape, or without a oneDNN kernel, stays a separate operator; programs under
    autocast.
    Correct because: the operator is defined as act(conv(x, W, b)) and conv(x, W, b) + z; packing only
    reorders W. Every node before `last` has run when the fused call stands in its place. Intermediate
    results stay in FP32 registers, where separate kernels round them. A kernel may lay its result out
    otherwise: results that were copies, and may be views of one memory by that, are copied.
    Cost: a second copy of the weights. Elsewhere, and in exported models, the plain form runs.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.KERNEL
    portable = False
    shape_dependent = True

    def why_not(self, program: Program) -> str | None:
        """Declines other devices: the operators exist for CPUs with oneDNN only."""
        if program.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return "oneDNN's fused operators need a CPU"
        return "it still runs under autocast" if program.under_autocast else None

    def apply(self, program: Program) -> Result:
        """Match from the convolution forwards, check, pack, fuse; see the class."""
        module, rewrites = record_shapes(program), 0
        declined: list[Declined] = []
        for conv in calls(module, [aten.conv2d.default]):
            if reason := _why_not(conv):
                declined.append(Declined(conv.name, reason))
                continue
            chain = _chain(conv)
            if chain.other is not None and not _can_add(module, chain):
                chain = _Chain(conv, conv)
            _fuse(module, chain)
            rewrites += 1
        if rewrites:
            keep_results_apart(program, module)
        return Result(program.with_graph(finish(module)) if rewrites else program, rewrites, tuple(declined))


def _why_not(conv: fx.Node) -> str | None:
    if (name := computed_weight(conv)) is not None:
        return f"its {name} is computed"
    if len(shape_of(conv)) != 4:
        return "its input has no batch"
    if dtype_of(conv) not in (torch.float32, torch.bfloat16):
        return f"oneDNN has no {str(dtype_of(conv)).removeprefix('torch.')} convolution"
    if dtype_of(conv) is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no bfloat16 instructions that oneDNN could use"
    return None


def _chain(conv: fx.Node) -> _Chain:
    """As much behind the convolution as one kernel can do."""
    reader = only_user(conv)
    if reader is None:
        return _Chain(conv, conv)
    if reader.target in _UNARY:
        return _Chain(conv, reader, activation=_UNARY[reader.target])
    if reader.target is not aten.add.Tensor or arguments(reader)["alpha"] != 1:
        return _Chain(conv, conv)
    other = next((arg for arg in reader.args if isinstance(arg, fx.Node) and arg is not conv), None)
    if other is None or not _same_kind(conv, other):
        return _Chain(conv, conv)
    return _Chain(conv, reader, other)


def _same_kind(conv: fx.Node, other: fx.Node) -> bool:
    if not gives_a_tensor(other):
        return False
    mine, theirs = tensor_meta(conv), tensor_meta(other)
    return mine.shape == theirs.shape and mine.dtype is theirs.dtype


def _packed(module: fx.GraphModule, conv: fx.Node) -> tuple[Tensor, tuple[Any, ...]]:
    """A convolution's weight as the kernel wants it; its padding, stride, dilation and groups."""
    own = arguments(conv)
    weight = constant(module, own["weight"])
    assert weight is not None
    padding, stride, dilation = (
        list(own[key]) * (2 if len(own[key]) == 1 else 1) for key in ("padding", "stride", "dilation")
    )
    geometry = (padding, stride, dilation, own["groups"])
    sizes = list(shape_of(own["input"]))
    return torch.ops.mkldnn._reorder_convolution_weight(weight, *geometry, sizes), geometry


def _can_add(module: fx.GraphModule, chain: _Chain) -> bool:
    """Whether oneDNN has the kernel with the add: for some shapes it raises in PyTorch 2.11."""
    own = arguments(chain.conv)
    packed, geometry = _packed(module, chain.conv)
    assert chain.other is not None
    x, z = (
        torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).zero_()
        for meta in map(tensor_meta, (own["input"], chain.other))
    )
    bias = constant(module, own["bias"])
    try:
        torch.ops.mkldnn._convolution_pointwise.binary(
            x, z, packed, bias, *geometry, "add", 1.0, None, [], None
        )
    except RuntimeError:
        return False
    return True


def _fuse(module: fx.GraphModule, chain: _Chain) -> None:
    own, onednn = arguments(chain.conv), torch.ops.mkldnn
    packed, geometry = _packed(module, chain.conv)
    node = add_constant(module, f"{chain.conv.name}_packed", packed, chain.conv)
    if chain.other is None:
        settings: tuple[Any, ...] = (*geometry, chain.activation, [], "")
        call: tuple[Any, ...] = (own["input"], node, own["bias"], *settings)
        fused = insert_call(module, chain.last, onednn._convolution_pointwise.default, *call)
    else:
        call = (own["input"], chain.other, node, own["bias"], *geometry, "add", 1.0, None, [], None)
        fused = insert_call(module, chain.last, onednn._convolution_pointwise.binary, *call)
    fused.meta["tensor_meta"] = chain.last.meta["tensor_meta"]  # a later match may add this result
    replace(chain.last, fused)
