"""The operators that a program file may contain: ATen operators that only compute tensors from tensors.

A file may come from an untrusted source, so an operator is allowed only if its namespace, schema and tags
prove that it is safe. Words in its name exclude cases that schema and tags do not show: operators that read
files or uninitialised memory, trust indices or layouts without checking them, or exist on one machine only.
"""

from __future__ import annotations

import functools
import re

import torch
from torch import fx
from torch._ops import OpOverload

from ampopt.ir.graph import SWITCHES, arguments, draws_random_numbers

_UNFIT = {
    r"from_file|pin_memory": "it reaches beyond tensors, to files or to the process",
    r"empty|resize|^set$|^data$": "it shows memory that nothing has written",
    r"cudnn|miopen|mkldnn|mps|fbgemm|xnnpack": "it belongs to one machine's own libraries",
    r"sparse|hspmm|^smm$|sspaddmm|coalesce|(row|col)_indices|^(indices|values)|to_dense|nested|padded": (
        "it deals in tensors that are not plain arrays"
    ),
    r"^quantize|dequantize|^q_|qparams|int_repr": "it deals in quantized tensors",
    r"^(linalg_)?(ldl|lu)_|ormqr|orgqr|geqrf|householder|ctc_loss|embedding_bag|segment_reduce|^_fft": (
        "it trusts indices and sizes that it is given"
    ),
    r"backward|_jvp$|overrideable|^batch_norm_.*(elemt|stats)": "it serves training",
}
"""What words in an operator's name say against it."""

_PRIVATE = {
    "_conj",
    "_neg_view",
    "_unsafe_view",
    "_unsafe_index",
    "_safe_softmax",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
}
"""Operators for PyTorch's own use that conjugates, decompositions and interpolation leave in graphs, and that
check their arguments; others count where PyTorch has them in its core set."""

_UNFIT_TAGS = {
    torch.Tag.data_dependent_output: "its result is not a tensor",
    torch.Tag.inplace_view: "it changes its argument",
}


@functools.cache
def _registered() -> frozenset[str]:
    """The ATen operators of this PyTorch as `aten.add.Tensor`; those known to TorchScript only are absent."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    full = (name if "." in name else f"{name}.default" for name in names if name.startswith("aten::"))
    return frozenset(name.replace("::", ".") for name in full)


def find_operator(name: str) -> OpOverload | None:
    """The operator for a name such as `aten.add.Tensor`; None if this PyTorch has no such ATen operator.

    Only names in the registry of operators are looked up.
    """
    if name not in _registered():
        return None
    _, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet), overload)
    return found if isinstance(found, OpOverload) else None


def why_not_operator(operator: object) -> str | None:
    """Why a program with this operator cannot be written or read; None if it can."""
    if not isinstance(operator, OpOverload) or str(operator) not in _registered():
        return "it is no operator of ATen"
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    if schema.is_mutable:
        return "it changes its argument"
    results = {str(result.type) for result in schema.returns}
    if not results or not results <= {"Tensor", "List[Tensor]"}:
        return "its result is not a tensor"
    for tag, reason in _UNFIT_TAGS.items():
        if tag in operator.tags:
            return reason
    core = torch.Tag.core in operator.tags or torch.Tag.pointwise in operator.tags
    private = name.startswith("_") and not name.startswith("__")  # `__and__` is Python's `&`
    if private and not core and name not in _PRIVATE:
        return "it is for PyTorch's own use"
    reasons = (reason for words, reason in _UNFIT.items() if re.search(words, name))
    switches = {argument.name for argument in schema.arguments} & SWITCHES.keys()
    if torch.Tag.nondeterministic_seeded in operator.tags and not switches:
        return "it draws random numbers"
    return next(reasons, None)


def why_not_call(node: fx.Node) -> str | None:
    """Why a call of an allowed operator is refused with these arguments."""
    operator = node.target
    if not isinstance(operator, OpOverload):
        return None
    if draws_random_numbers(node):
        return "it draws random numbers"
    values = arguments(node)
    in_training = values.get("training") or values.get("train") or values.get("use_input_stats")
    if in_training and values.get("running_mean") is not None:
        return "it changes its running statistics"
    return None
