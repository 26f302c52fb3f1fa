"""FLOP of operators that `torch.utils.flop_counter` does not know, or knows on some devices alone.

A multiplication with an addition is two; outer products, which sum nothing, are not among them. As PyTorch
counts attention, what a causal mask leaves out is in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Arguments = Mapping[str, Any]
"""An operator's arguments by their schema names."""


def own_flops(operator: str, given: Arguments, result: Tensor) -> int | None:
    """The FLOP of a call of an operator, such as `lstm`, by its formula; None where there is none here."""
    formula = _FORMULAS.get(operator)
    return None if formula is None else formula(given, result)


def _recurrent(given: Arguments, _: Tensor) -> int:
    """Each step of a sequence is multiplied with every matrix, of all layers, directions and projections."""
    steps: Tensor = given["data" if "data" in given else "input"]
    matrices: list[Tensor] = [weight for weight in given["params"] if weight.dim() == 2]
    return 2 * math.prod(steps.shape[:-1]) * sum(weight.numel() for weight in matrices)


def _attention(given: Arguments, result: Tensor) -> int:
    """The products of queries with keys, and of weights with values, for each head of the queries."""
    query, key, value = (given[name].shape for name in ("query", "key", "value"))
    return 2 * math.prod(result.shape[:-1]) * int(key[-2]) * int(query[-1] + value[-1])


def _by_filter(given: Arguments, result: Tensor) -> int:
    """Each element of the result sums as many products as an output of the weight has elements."""
    weight: Tensor = given["weight"]
    return 2 * result.numel() * math.prod(weight.shape[1:])


def _by_filter_of_steps(given: Arguments, result: Tensor) -> int:
    """As above, of a weight whose last dimension is that of its outputs."""
    weight: Tensor = given["weight"]
    return 2 * result.numel() * math.prod(weight.shape[:-1])


def _matmul(given: Arguments, result: Tensor) -> int:
    return 2 * result.numel() * int(given["self"].shape[-1])


def _sum_of_products(given: Arguments, result: Tensor) -> int:
    """Each element of the result is summed over the matrices of the batch, too."""
    batch, _, inner = given["batch1"].shape
    return 2 * result.numel() * int(batch * inner)


def _grouped(given: Arguments, result: Tensor) -> int:
    """Products of groups; where both are matrices, the dimension that is summed over is shared out."""
    groups = len(result) if given["self"].dim() == given["mat2"].dim() == 2 else 1
    return _matmul(given, result) // groups


def _of_vectors(given: Arguments, _: Tensor) -> int:
    return 2 * int(given["mat" if "mat" in given else "self"].numel())


def _of_many_vectors(given: Arguments, _: Tensor) -> int:
    shape: tuple[int, ...] = torch.broadcast_shapes(given["x"].shape, given["y"].shape)
    return 2 * math.prod(shape)


_FORMULAS: dict[str, Callable[[Arguments, Tensor], int]] = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("bilinear", "torchvision.deform_conv2d"), _by_filter),
    "conv_tbc": _by_filter_of_steps,
    **dict.fromkeys(("matmul", "inner", "_int_mm"), _matmul),
    "addbmm": _sum_of_products,
    "_grouped_mm": _grouped,
    "linalg_vecdot": _of_many_vectors,
    **dict.fromkeys(("mv", "addmv", "dot", "vdot"), _of_vectors),
}
