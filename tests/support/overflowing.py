"""Small networks that overflow in float16, each in its own way, while their outputs are ordinary numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import Model

IMAGE = (2, 3, 16, 16)
TOKENS = (2, 12, 32)


def scale(layer: nn.Module, factor: float) -> None:
    """Multiply a layer's weight."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        weight.mul_(factor)


class Branches(nn.Module):
    """As MobileOne has them: parallel branches with a batch norm each, to be merged after training."""

    def __init__(self, channels: int, gain: float) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), _norm(channels))
        self.point = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), _norm(channels))
        self.skip = _norm(channels)
        for block in (self.wide, self.point):
            scale(block[0], gain)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wide(x) + self.point(x) + self.skip(x)
        return y.relu()


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, momentum=1.0)


def _trained(model: nn.Module) -> nn.Module:
    """The model with the batch norm statistics of one batch."""
    model.train()
    with torch.no_grad():
        model(torch.randn(8, *IMAGE[1:]))
    return model.eval()


def branches() -> nn.Module:
    """The middle block of three overflows before its norms, which bring it into range again."""
    torch.manual_seed(0)
    stem, blocks = nn.Conv2d(3, 8, 3, padding=1), [Branches(8, gain) for gain in (1.0, 4e5, 1.0)]
    return _trained(nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))


def sums() -> nn.Module:
    """No norm: of three branches that are in range each the sum is not, and what follows scales it down."""
    torch.manual_seed(0)

    def function(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.last((m.a(x) + m.b(x) + m.a(x)).relu() * 1e-4)
        return y

    a, b = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
    with torch.no_grad():
        a.weight.abs_().mul_(3.2e4 / float(_largest(a)))
        a.bias.zero_()  # type: ignore[union-attr]
        b.load_state_dict(a.state_dict())
    return Model(function, a=a, b=b, last=nn.Conv2d(8, 4, 3)).eval()


def _largest(conv: nn.Conv2d) -> Tensor:
    """The largest result for inputs of at most 1."""
    return conv.weight.detach().sum((1, 2, 3)).max()


def one_branch() -> nn.Module:
    """One of two branches overflows."""
    torch.manual_seed(0)

    def function(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.last(m.ordinary(x).relu() + m.norm(m.huge(x)))
        return y

    huge = nn.Conv2d(3, 8, 3, padding=1)
    with torch.no_grad():
        huge.weight.mul_(1e6)
    ordinary, last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
    return _trained(Model(function, ordinary=ordinary, huge=huge, norm=_norm(8), last=last))


def attention() -> nn.Module:
    """Logits that float16 cannot hold, before a softmax that can bear them."""
    torch.manual_seed(1)

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        logits = m.q(y) @ m.k(y).transpose(-1, -2)
        z: Tensor = x + m.out(logits.softmax(-1) @ m.v(y))
        return z

    parts: dict[str, nn.Module] = {name: nn.Linear(32, 32) for name in ("q", "k", "v", "out")}
    scale(parts["q"], 150.0)
    scale(parts["k"], 150.0)
    return Model(function, norm=nn.LayerNorm(32), **parts).eval()


def last_layers() -> nn.Module:
    """The outputs themselves are out of range."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model.append(nn.Linear(8, 8)).append(nn.Linear(8, 4))
    scale(model[6], 1e6)
    scale(model[7], 10.0)
    return model.eval()


def everything() -> nn.Module:
    """From the first convolution on, nothing is in range any more."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(3 if place == 0 else 8, 8, 3, padding=1) for place in range(5)))
    scale(model[0], 1e7)
    return model.eval()


def large_norm() -> nn.Module:
    """A layer norm, and a softmax behind it, of numbers that float16 cannot hold."""
    torch.manual_seed(0)

    def function(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.last(m.mid(m.norm(m.first(x) * 1e6)).softmax(-1))
        return y

    first, mid, last = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(8, 4)
    return Model(function, first=first, norm=nn.LayerNorm(32), mid=mid, last=last).eval()


class Recurrent(nn.Module):
    """A state that grows from call to call, out of float16's range from the sixth call on."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("state", torch.zeros(2, 8))
        with torch.no_grad():
            self.first.weight.abs_()
            self.again.weight.copy_(torch.eye(8) * 6)
            self.last.weight.mul_(1e-5)

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.again(self.state) + self.first(x.abs())
        y: Tensor = self.last(self.state)
        return y


def recurrent() -> nn.Module:
    """See `Recurrent`."""
    torch.manual_seed(0)
    return Recurrent().eval()
