"""What an operator would give, asked with tensors that have no numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def result_of(mode: FakeTensorMode, target: Any, node: fx.Node) -> Any:
    """What an operator gives for a node's arguments, whose values (`val`) are known.

    A tensor with numbers, a constant of the model, is taken for one without: of such a one PyTorch computes
    with the numbers. Raises what the operator raises for them.
    """

    def valued(source: fx.Node) -> Any:
        value = source.meta["val"]
        if not isinstance(value, Tensor) or (isinstance(value, FakeTensor) and value.constant is None):
            return value
        if value.layout is not torch.strided or value.is_quantized:
            return mode.from_tensor(value, static_shapes=True)
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    with mode:
        return target(*fx.map_arg(node.args, valued), **fx.map_arg(node.kwargs, valued))
