"""Where a model writes a limit of its dtype, as masks do with `torch.finfo(x.dtype).min`: casts to FP32."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ampopt.ir.graph import aten, calls, insert_call

_FP32 = torch.finfo(torch.float32)
_LIMITS = (_FP32.max, _FP32.min, _FP32.tiny)


def widen_limits(module: fx.GraphModule) -> None:
    """Let every call with a limit of float32 among its numbers compute in float32: `f(x)` -> `f(x.float())`.

    Under autocast the model itself would write the limit of the lower dtype. The graph has float32's in all
    lanes, which float16 and bfloat16 round to infinity or to 0, and which `masked_fill` and `clamp` refuse
    there. The casts do nothing in float32. Requires that the nodes have their values (`val`).
    """
    for node in list(calls(module)):
        numbers = (each for each in (*node.args, *node.kwargs.values()) if isinstance(each, float))
        if all(number not in _LIMITS for number in numbers):
            continue
        for source in node.all_input_nodes:
            value = source.meta.get("val")
            if source.op != "get_attr" and isinstance(value, Tensor) and value.dtype is torch.float32:
                cast = insert_call(module, node, aten.to.dtype, source, torch.float32)
                node.replace_input_with(source, cast)
