"""FLOP of operators that `torch.utils.flop_counter` does not know, or knows on some devices alone.

A multiplication with an addition is two. As PyTorch counts attention, what a causal mask leaves out is in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

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


def _matmul(given: Arguments, result: Tensor) -> int:
    return 2 * result.numel() * int(given["self"].shape[-1])


def _of_vectors(given: Arguments, _: Tensor) -> int:
    return 2 * int(given["mat" if "mat" in given else "self"].numel())


_FORMULAS: dict[str, Callable[[Arguments, Tensor], int]] = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("bilinear", "torchvision.deform_conv2d"), _by_filter),
    "matmul": _matmul,
    **dict.fromkeys(("mv", "addmv", "dot", "vdot"), _of_vectors),
}
