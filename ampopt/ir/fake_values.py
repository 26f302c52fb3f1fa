"""What an operator would give, asked with tensors that have no numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def result_of(mode: FakeTensorMode, target: Any, node: fx.Node) -> Any:
    """What an operator gives for a node's arguments, whose values (`val`) are known.

    Raises what the operator raises for them.
    """

    def valued(source: fx.Node) -> Any:
        value = source.meta["val"]
        is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        return mode.from_tensor(value, static_shapes=True) if is_real else value

    with mode:
        return target(*fx.map_arg(node.args, valued), **fx.map_arg(node.kwargs, valued))
