"""Activations, arithmetic, casts, masks and constants."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.layers.step import Builder, Maker, Step, World, channels, features, need, weight
from fuzz.pick import Pick

Way = tuple[str, Any]


def activation(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """One of torch's activation modules, in place or not."""
    inplace = pick.maybe(0.25)
    need(x.dim() > 0)
    makers: list[Maker] = [
        lambda: nn.ReLU(inplace=inplace),
        lambda: nn.ReLU(),
        lambda: nn.ReLU6(inplace=inplace),
        lambda: nn.SiLU(inplace=inplace),
        lambda: nn.Hardswish(inplace=inplace),
        lambda: nn.Hardsigmoid(inplace=inplace),
        lambda: nn.Sigmoid(),
        lambda: nn.Tanh(),
        lambda: nn.GELU(approximate=pick.one("none", "tanh")),
        lambda: nn.LeakyReLU(pick.one(0.01, 0.2, -0.5), inplace=inplace),
        lambda: nn.ELU(pick.one(1.0, 0.5), inplace=inplace),
        lambda: nn.CELU(2.0, inplace=inplace),
        lambda: nn.SELU(inplace=inplace),
        lambda: nn.Mish(inplace=inplace),
        lambda: nn.Softplus(pick.one(1, 2), pick.one(20, 1)),
        lambda: nn.LogSigmoid(),
        lambda: nn.PReLU(),
        lambda: nn.PReLU(channels(x)),
        lambda: nn.Hardtanh(-0.5, pick.one(0.5, 2.0), inplace=inplace),
        lambda: nn.Softsign(),
        lambda: nn.Softshrink(0.3),
        lambda: nn.Hardshrink(0.3),
        lambda: nn.Tanhshrink(),
        lambda: nn.Threshold(0.1, -2.0, inplace=inplace),
        lambda: nn.RReLU(inplace=inplace),
        lambda: nn.GLU(pick.one(-1, 1)),
    ]
    return pick.one(*makers)()


def softmax(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Softmax and its relatives along any dimension."""
    need(x.dim() > 0)
    dim = pick.number(-x.dim(), x.dim() - 1)
    kind: Maker = pick.one(nn.Softmax, nn.LogSoftmax, nn.Softmin)
    return kind(dim)


def dropout(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Dropout, which does nothing in evaluation."""
    kinds: list[Maker] = [nn.Dropout, nn.AlphaDropout, nn.Identity]
    kind = pick.one(*kinds, nn.FeatureAlphaDropout, nn.Dropout2d) if x.dim() == 4 else pick.one(*kinds)
    if pick.maybe(0.2):
        return Step("F.dropout(x, 0.3, self.training)", lambda s, x, seen: F.dropout(x, 0.3, s.training))
    return kind()


def arithmetic(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Arithmetic with numbers, in all spellings."""
    ways: list[Way] = [
        ("x * 2 + 1", lambda s, x, seen: x * 2 + 1),
        ("2 - x", lambda s, x, seen: 2 - x),
        ("x / 3", lambda s, x, seen: x / 3),
        ("1 / (x.abs() + 1)", lambda s, x, seen: 1 / (x.abs() + 1)),
        ("x ** 2 * 0.1", lambda s, x, seen: x**2 * 0.1),
        ("(x.abs() + 0.1) ** 0.5", lambda s, x, seen: (x.abs() + 0.1) ** 0.5),
        ("x.clamp(max=3).exp()", lambda s, x, seen: x.clamp(max=3).exp()),
        ("log1p(abs x)", lambda s, x, seen: x.abs().log1p()),
        ("log(abs x + 1e-3)", lambda s, x, seen: torch.log(x.abs() + 1e-3)),
        ("rsqrt(x² + 1)", lambda s, x, seen: (x * x + 1).rsqrt()),
        ("erf x", lambda s, x, seen: x.erf()),
        ("-x", lambda s, x, seen: -x),
        ("abs x", lambda s, x, seen: x.abs()),
        ("sin x + cos x", lambda s, x, seen: x.sin() + x.cos()),
        ("atan x", lambda s, x, seen: x.atan()),
        ("x.add(x, alpha=-3)", lambda s, x, seen: x.add(x, alpha=-3)),
        ("x.sub(1.5, alpha=2)", lambda s, x, seen: x.sub(1.5, alpha=2)),
        ("rsub(x, 1, alpha=3)", lambda s, x, seen: torch.rsub(x, 1, alpha=3)),
        ("x + 0", lambda s, x, seen: x + 0),
        ("x * 1", lambda s, x, seen: x * 1),
        ("x * 0", lambda s, x, seen: x * 0),
        ("x - x", lambda s, x, seen: x - x),
        ("x + True", lambda s, x, seen: x + True),
        ("nan_to_num x", lambda s, x, seen: torch.nan_to_num(x, 0.0, 1.0, -1.0)),
        ("x.expm1().clamp(max=5)", lambda s, x, seen: x.expm1().clamp(max=5)),
        ("logit sigmoid x", lambda s, x, seen: x.sigmoid().logit(1e-3)),
    ]
    words, function = pick.one(*ways)
    return Step(words, function)


def discontinuous(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Functions with jumps, where rounding alone may move a result far."""
    ways: list[Way] = [
        ("floor", lambda s, x, seen: x.floor()),
        ("round", lambda s, x, seen: (x * 3).round() / 3),
        ("sign", lambda s, x, seen: x.sign()),
        ("remainder(x, 2)", lambda s, x, seen: torch.remainder(x, 2)),
        ("trunc", lambda s, x, seen: x.trunc()),
        ("x // 0.7", lambda s, x, seen: x // 0.7),
        ("(x > 0.1).to(x.dtype)", lambda s, x, seen: (x > 0.1).to(x.dtype)),
    ]
    words, function = pick.one(*ways)
    return Step(words, function)


def with_weights(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Arithmetic with weights and buffers that broadcast."""
    n = features(x)
    ways: list[Way] = [
        ("x * gamma + beta", lambda s, x, seen: x * s.gamma + s.beta),
        ("addcmul(x, gamma, beta)", lambda s, x, seen: torch.addcmul(x, s.gamma, s.beta, value=0.5)),
        ("addcdiv(x, gamma, exp beta)", lambda s, x, seen: torch.addcdiv(x, s.gamma, s.beta.exp())),
        ("lerp(x, gamma, 0.3)", lambda s, x, seen: torch.lerp(x, s.gamma.expand_as(x), 0.3)),
        ("maximum(x, gamma)", lambda s, x, seen: torch.maximum(x, s.gamma)),
        ("x.clamp(gamma - 1, gamma.abs() + 1)", lambda s, x, seen: x.clamp(s.gamma - 1, s.gamma.abs() + 1)),
        ("x + scalar", lambda s, x, seen: x + s.scalar),
        ("scalar - x", lambda s, x, seen: s.scalar - x),
        ("gamma folded", lambda s, x, seen: x * (s.gamma.softmax(-1) * 2 + s.beta.sigmoid()).flip(0)),
        ("x + softmax of a constant", lambda s, x, seen: x + torch.softmax(torch.arange(float(n)), 0).to(x)),
        ("x * tensor([2.0])", lambda s, x, seen: x * torch.tensor([2.0]).to(x)),
        ("x + eye", lambda s, x, seen: x + torch.eye(n, dtype=x.dtype, device=x.device).sum(0)),
        ("x + linspace", lambda s, x, seen: x + torch.linspace(0, 1, n, dtype=x.dtype, device=x.device)),
        ("x * full", lambda s, x, seen: x * torch.full((1,), 1.5, dtype=x.dtype, device=x.device)),
        ("x + zeros_like", lambda s, x, seen: x + torch.zeros_like(x)),
        ("hypot(x, gamma)", lambda s, x, seen: torch.hypot(x, s.gamma)),
    ]
    words, function = pick.one(*ways)
    return Step(words, function, gamma=weight(n), beta=torch.randn(n), scalar=nn.Parameter(torch.tensor(0.7)))


def with_earlier(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Arithmetic with an earlier result, which broadcasts or is brought to the shape."""
    back = pick.number(1, 4)

    def fitted(x: Tensor, seen: Any) -> Tensor:
        z: Tensor = seen[-min(back, len(seen))]
        if z.shape == x.shape and z.dtype == x.dtype:
            return z
        return z.to(x.dtype).mean() if z.numel() else x

    ways: list[Way] = [
        ("x + z", lambda s, x, seen: x + fitted(x, seen)),
        ("z + x", lambda s, x, seen: fitted(x, seen) + x),
        ("relu(x + z)", lambda s, x, seen: torch.relu(x + fitted(x, seen))),
        ("x - z", lambda s, x, seen: x - fitted(x, seen)),
        ("x * z", lambda s, x, seen: x * torch.tanh(fitted(x, seen))),
        ("x / (z² + 1)", lambda s, x, seen: x / (fitted(x, seen) ** 2 + 1)),
        ("add(x, z, alpha=2)", lambda s, x, seen: torch.add(x, fitted(x, seen), alpha=2)),
        ("minimum(x, z)", lambda s, x, seen: torch.minimum(x, fitted(x, seen).expand_as(x))),
        ("where(z > 0, x, z)", lambda s, x, seen: torch.where(fitted(x, seen) > 0, x, fitted(x, seen))),
        ("cat([x, z])", lambda s, x, seen: torch.cat([x, fitted(x, seen).expand_as(x)], -1)),
    ]
    words, function = pick.one(*ways)
    return Step(f"{words}, z {back} results back", function)


def mask(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Masks and selections by value."""
    value = pick.one(0.0, -1.0, 0.5)
    ways: list[Way] = [
        ("where(x > v, x, v)", lambda s, x, seen: torch.where(x > value, x, value)),
        ("masked_fill(x < v, 0)", lambda s, x, seen: x.masked_fill(x < value, 0.0)),
        ("clamp(v, v + 1)", lambda s, x, seen: x.clamp(value, value + 1)),
        ("clamp(min=v)", lambda s, x, seen: x.clamp(min=value)),
        ("clamp(max=v)", lambda s, x, seen: torch.clamp_max(x, value)),
        ("x * (x > v)", lambda s, x, seen: x * (x > value)),
        ("x * ((x > v) & (x < v + 1))", lambda s, x, seen: x * ((x > value) & (x < value + 1))),
        ("tril x", lambda s, x, seen: x.tril()),
        ("where(isnan x, v, x)", lambda s, x, seen: torch.where(torch.isnan(x), value, x)),
        ("where(all > v, x, -x)", lambda s, x, seen: torch.where((x > value).all(), x, -x)),
    ]
    words, function = pick.one(*ways)
    return Step(f"{words}, v = {value}", function)


def cast(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """To another dtype and back, in all spellings."""
    dtype = x.dtype
    ways: list[Way] = [
        ("x.half() and back", lambda s, x, seen: x.half().to(x.dtype)),
        ("x.bfloat16() * 2 and back", lambda s, x, seen: (x.bfloat16() * 2).to(x.dtype)),
        ("x.double().sin() and back", lambda s, x, seen: x.double().sin().to(x.dtype)),
        ("x.to(its dtype)", lambda s, x, seen: x.to(dtype)),
        ("x.type_as(x)", lambda s, x, seen: x.type_as(x)),
        ("x.clamp(-9, 9).long() and back", lambda s, x, seen: (x.clamp(-9, 9) * 4).long().to(x.dtype) / 4),
        ("(x > 0).int() + x", lambda s, x, seen: (x > 0).int() + x),
        ("x.to(x.device)", lambda s, x, seen: x.to(x.device)),
        ("x.to(copy=True)", lambda s, x, seen: x.to(dtype, copy=True)),
        ("x.float().to(x.dtype)", lambda s, x, seen: x.float().to(x.dtype)),
        ("x.clone()", lambda s, x, seen: x.clone()),
        ("x.detach()", lambda s, x, seen: x.detach()),
    ]
    words, function = pick.one(*ways)
    return Step(words, function)


def autocast_block(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A layer within the model's own autocast: on, in either dtype, or off."""
    n = features(x)
    enabled, low = pick.maybe(0.6), pick.one(torch.bfloat16, torch.float16)

    def run(s: Any, x: Tensor, seen: Any) -> Any:
        with torch.autocast(x.device.type, dtype=low, enabled=enabled):
            y: Tensor = s.layer(x)
        return y.to(x.dtype)

    def sandwich(s: Any, x: Tensor, seen: Any) -> Any:
        y = s.layer(x).to(x.dtype)
        with torch.autocast(x.device.type, dtype=low, enabled=enabled):
            z: Tensor = s.layer(y).relu() + y
        return s.layer(z.to(x.dtype)).to(x.dtype)

    form = pick.maybe(0.3)
    words = f"linear under autocast({low}, enabled={enabled}){' between linears' if form else ''}"
    return Step(words, sandwich if form else run, layer=nn.Linear(n, n))


ELEMENTWISE: dict[str, tuple[float, Builder]] = {
    "activation": (9, activation),
    "softmax": (1, softmax),
    "dropout": (1, dropout),
    "arithmetic": (3, arithmetic),
    "discontinuous": (0.3, discontinuous),
    "with_weights": (3, with_weights),
    "with_earlier": (5, with_earlier),
    "mask": (1.5, mask),
    "cast": (1.5, cast),
    "autocast_block": (0.6, autocast_block),
}
"""By name: how often it is drawn, in proportion, and what makes it."""
