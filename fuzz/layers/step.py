"""What a layer of a random network is: a module, or a function in words and in code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.pick import Pick

Function = Callable[[Any, Tensor, Sequence[Tensor]], Any]


class DoesNotFit(Exception):  # noqa: N818  it is an answer, not an error
    """A layer cannot follow here: a tensor of this shape or dtype is nothing for it."""


class Step(nn.Module):
    """A layer that is a function `(self, x, seen)`; `seen` are the inputs and all results before `x`.

    `words` is the function's source as the description of a network prints it; `members` become parameters
    (`nn.Parameter`), buffers (other tensors), submodules or plain attributes.
    """

    def __init__(self, words: str, function: Function, **members: Any) -> None:
        super().__init__()
        self.words, self.function = words, function
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, x: Tensor, seen: Sequence[Tensor]) -> Tensor:
        y: Tensor = self.function(self, x, seen)
        return y

    def extra_repr(self) -> str:
        return self.words


class World:
    """What the layers of one network share: the modules made so far, each with the tensor that it took."""

    def __init__(self) -> None:
        self.made: list[nn.Module] = []


Builder = Callable[[Pick, Tensor, World], nn.Module]
"""Makes a layer that can follow a tensor like the given one, or raises DoesNotFit."""


Maker = Callable[..., nn.Module]
"""A class of modules, or what else makes one; tables of them tell no more about their arguments."""


def need(fits: bool) -> None:
    """Raise DoesNotFit unless the condition holds."""
    if not fits:
        raise DoesNotFit


def spatial(x: Tensor) -> int:
    """The number of spatial dimensions of a batch of images: [N, C, *spatial]."""
    need(3 <= x.dim() <= 5)
    return x.dim() - 2


def channels(x: Tensor) -> int:
    """The number of channels of a batch: dimension 1."""
    need(x.dim() >= 2 and 0 < x.shape[1] <= 64)
    return x.shape[1]


def features(x: Tensor) -> int:
    """The size of the last dimension."""
    need(x.dim() >= 1 and 0 < x.shape[-1] <= 64)
    return x.shape[-1]


def weight(*shape: int, scale: float = 0.3) -> nn.Parameter:
    """A random parameter."""
    return nn.Parameter(torch.randn(shape) * scale)
