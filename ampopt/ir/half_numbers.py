"""Factors and divisors that float16 does not hold, for runtimes that keep them in the dtype of their tensor.

PyTorch multiplies a float16 tensor by 1e-7, or divides it by 1e5, in float32, and rounds the result. In ONNX
the number has the tensor's dtype: it is 1.2e-7, or infinite. So the call is written in float32, with casts.
Sums need no such form: where the number does not fit, neither does its share of the result. A number that
sizes make may not fit at any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.passes.shape_prop import ShapeProp

from ampopt.ir.graph import aten, calls, cast_for_readers, copy_of, dtype_of, finish, insert_call
from ampopt.ir.size_numbers import is_number

_SCALING = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


def with_numbers_that_fit(module: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    """The graph with float32 around these calls; unchanged if there are none.

    `examples` are inputs of the graph: a run on them tells dtypes.
    """
    if not any(_is_rounded(node) or _may_be_number(node.args[1]) for node in calls(module, _SCALING)):
        return module
    changed = copy_of(module)
    ShapeProp(changed).propagate(*examples)
    for node in list(calls(changed, _SCALING)):
        if (_is_rounded(node) or is_number(node.args[1])) and dtype_of(node) is torch.float16:
            wide = insert_call(changed, node, aten._to_copy.default, node.args[0], dtype=torch.float32)
            node.args = (wide, *node.args[1:])
            cast_for_readers(changed, node, torch.float16)
    return finish(changed)


def _may_be_number(value: Any) -> bool:
    """Whether an argument is a size, or what Python's operators make of sizes; only a run tells."""
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return False
    return value.target is aten.sym_size.int or not isinstance(value.target, OpOverload)


def _is_rounded(node: fx.Node) -> bool:
    """Whether float16 changes the number of a call by more than it rounds any result."""
    number = node.args[1]
    if not isinstance(number, int | float) or number != number:
        return False
    half = float(torch.tensor(number, dtype=torch.float64, device="cpu").half())
    return abs(half - number) > torch.finfo(torch.float16).eps * abs(number)
