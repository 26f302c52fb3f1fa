"""A model with layers of every kind that a fused convolution may be made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ampopt.passes import ChannelsLast
from tests.helpers import Model

Function = Callable[[Any, Tensor], Any]
NHWC = [ChannelsLast()]


def convolving(function: Function) -> Model:
    """`a`, `b` of the same shape, strided `s`, `d`, grouped `g`, depthwise `w`, 1x1 `p`, `q`, linear `l`."""
    return Model(
        function,
        a=nn.Conv2d(16, 16, 3, padding=1),
        b=nn.Conv2d(16, 16, 3, padding=1, bias=False),
        s=nn.Conv2d(16, 24, 3, stride=2, padding=(2, 1), dilation=2),
        d=nn.Conv2d(16, 24, 1, stride=2),
        t=nn.Conv2d(16, 24, 3, stride=2, padding=1),
        g=nn.Conv2d(16, 16, 3, padding=1, groups=4),
        w=nn.Conv2d(16, 16, 3, padding=1, groups=16),
        p=nn.Conv2d(16, 16, 1),
        q=nn.Conv2d(16, 16, 1),
        l=nn.Linear(16, 16),
    )
