"""Convolutions in every form: dimensions, paddings, groups, computed and shared weights, parametrized."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fuzz.layers.step import Builder, Maker, Step, World, channels, features, need, spatial, weight
from fuzz.pick import Pick

CONVS: dict[int, Maker] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Maker] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
FUNCTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
NORMS: dict[int, Maker] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def _kernel(pick: Pick, dims: int, most: int = 3) -> int | tuple[int, ...]:
    if pick.maybe(0.7):
        return pick.number(1, most)
    return tuple(pick.number(1, most) for _ in range(dims))


def _out(pick: Pick, c: int) -> int:
    return pick.one(c, c, 2 * c, pick.number(1, 8))


def conv(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A plain convolution with odd options; groups, depthwise with a multiplier, named paddings."""
    dims, c = spatial(x), channels(x)
    out = _out(pick, c)
    stride: Any = pick.one(1, 1, 1, 2, (1, 2, 1)[:dims])
    padding: Any = pick.one(0, 1, 1, 2, "same", "valid", (1, 0, 2)[:dims])
    if padding == "same":
        stride = 1
    return CONVS[dims](
        c,
        out,
        _kernel(pick, dims),
        stride=stride,
        padding=padding,
        dilation=pick.one(1, 1, 1, 2, (2, 1, 1)[:dims]),
        groups=pick.divisor(c, out) if pick.maybe(0.4) else 1,
        bias=pick.maybe(),
        padding_mode=pick.one("zeros", "zeros", "zeros", "reflect", "replicate", "circular"),
    )


def pointwise(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A 1×1 convolution."""
    c = channels(x)
    return CONVS[spatial(x)](c, _out(pick, c), 1, bias=pick.maybe())


def depthwise(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A convolution with a group for each channel."""
    c = channels(x)
    factor = pick.one(1, 1, 2)
    return CONVS[spatial(x)](c, c * factor, pick.one(1, 3), padding=1, groups=c, bias=pick.maybe())


def transposed(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A transposed convolution, with groups and output padding."""
    dims, c = spatial(x), channels(x)
    out, stride = _out(pick, c), pick.one(1, 2)
    return TRANSPOSED[dims](
        c,
        out,
        _kernel(pick, dims),
        stride=stride,
        padding=pick.one(0, 0, 1),
        output_padding=pick.one(0, stride - 1),
        groups=pick.divisor(c, out) if pick.maybe() else 1,
        dilation=pick.one(1, 1, 2),
        bias=pick.maybe(),
    )


def unbatched(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A convolution that takes the batch for its channels."""
    need(x.dim() in (2, 3, 4) and 0 < x.shape[0] <= 64)
    dims, c = x.dim() - 1, x.shape[0]
    if pick.maybe(0.3):
        return TRANSPOSED[dims](c, c, 2, bias=pick.maybe())
    return CONVS[dims](c, c, 3, padding=1, groups=pick.divisor(c), bias=pick.maybe())


def batch_norm(dims: int, c: int, pick: Pick) -> nn.Module:
    """A batch norm whose statistics and affine part no mistake can hide behind."""
    norm: nn.Module = NORMS[dims](
        c, eps=pick.one(1e-5, 1e-5, 1e-3, 0.7, 1e-12), affine=pick.maybe(0.8), momentum=pick.one(0.1, None)
    )
    for tensor in (norm.running_mean, norm.bias):
        if isinstance(tensor, Tensor):
            nn.init.normal_(tensor)
    for tensor in (norm.running_var, norm.weight):
        if isinstance(tensor, Tensor):
            nn.init.uniform_(tensor, 0.3, 3.0)
    if pick.maybe(0.1):
        nn.init.zeros_(norm.get_buffer("running_var")[:1])
    return norm


def conv_bn(pick: Pick, x: Tensor, world: World) -> nn.Module:
    """A convolution or a transposed one, its batch norm and perhaps an activation."""
    dims = spatial(x)
    first = pick.one(conv, transposed, depthwise, pointwise)(pick, x, world)
    out = first(x.float()).shape[1]
    layers = [first, batch_norm(dims, out, pick)]
    kinds = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Identity)
    layers.append(pick.one(*kinds)())
    if pick.maybe(0.15):
        layers.insert(1, nn.Dropout(0.5))
    return nn.Sequential(*layers)


def linear_bn(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A linear layer and a batch norm over its features."""
    need(x.dim() == 2)
    out = pick.number(1, 8)
    return nn.Sequential(nn.Linear(channels(x), out, bias=pick.maybe()), batch_norm(1, out, pick))


def conv_add(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A convolution, a residual added in one of many ways, and perhaps an activation."""
    dims, c = spatial(x), channels(x)
    layer = CONVS[dims](c, c, 3, padding=1, groups=pick.divisor(c), bias=pick.maybe())
    alpha = pick.one(1, 1, 2, 0.5, -1)
    act: Any = pick.one(torch.relu, torch.relu, F.silu, torch.sigmoid, lambda y: y)
    form = pick.one("plain", "swapped", "alpha", "in place", "channel", "itself", "twice")
    ways: dict[str, Any] = {
        "plain": lambda s, x, seen: act(s.layer(x) + x),
        "swapped": lambda s, x, seen: act(x + s.layer(x)),
        "alpha": lambda s, x, seen: act(torch.add(s.layer(x), x, alpha=alpha)),
        "in place": lambda s, x, seen: act(s.layer(x).add_(x)),
        "channel": lambda s, x, seen: act(s.layer(x) + x[:, :1]),
        "itself": lambda s, x, seen: act((lambda y: y + y)(s.layer(x))),
        "twice": lambda s, x, seen: act(s.layer(x) + s.layer(x.relu())),
    }
    name = getattr(act, "__name__", "identity").replace("<lambda>", "identity")
    return Step(f"{name} of conv and x added: {form}, alpha {alpha}", ways[form], layer=layer)


def computed_weight(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A convolution whose weight is computed, from weights alone or from the input."""
    dims, c = spatial(x), channels(x)
    form = pick.one("scaled", "slice", "standardized", "from x", "buffer", "double use")
    function = FUNCTIONS[dims]

    def run(s: Any, x: Tensor, seen: Any) -> Any:
        w: Tensor = s.w
        if form == "scaled":
            w = w * s.scale.exp() + 0.1
        elif form == "slice":
            w = s.big[1 : 1 + c]
        elif form == "standardized":
            w = (w - w.mean(dim=(1, 2), keepdim=True)) / (w.std() + 1e-3)
        elif form == "from x":
            w = w * x.mean()
        y: Tensor = function(x, w, None, 1, 1)
        return y + w.sum() if form == "double use" else y

    shape = (c, c, *(3,) * dims)
    members: dict[str, Any] = {"w": weight(*shape), "scale": weight(1), "big": weight(c + 2, *shape[1:])}
    if form == "buffer":
        members["w"] = torch.randn(shape) * 0.3
    return Step(f"conv with a weight that is {form}", run, **members)


def tied(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Two layers whose weights lie in the same memory."""
    c = features(x)
    w = weight(c, c)
    form = pick.one("transpose", "parameter", "view")
    first, second = nn.Linear(c, c), nn.Linear(c, c, bias=pick.maybe())
    first.weight = w
    if form == "parameter":
        second.weight = w
        return nn.Sequential(first, pick.one(nn.ReLU, nn.Identity)(), second)
    if form == "view":
        second.weight = nn.Parameter(w.detach().view(c, c))
        return nn.Sequential(first, nn.Tanh(), second)
    return Step(
        "linear(linear(x, w), w.t())", lambda s, x, seen: F.linear(s.first(x), s.w.t()), first=first, w=w
    )


def parametrized(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A layer under weight normalization (the new and the old one) or spectral normalization."""
    c = channels(x)
    layer: nn.Module = nn.Linear(c, c) if x.dim() == 2 else CONVS[spatial(x)](c, c, 3, padding=1)
    form = pick.one("weight", "old weight", "spectral", "orthogonal")
    if form == "weight":
        return nn.Sequential(parametrizations.weight_norm(layer))
    if form == "spectral":
        return parametrizations.spectral_norm(layer)
    if form == "orthogonal":
        need(x.dim() == 2)
        square: nn.Module = parametrizations.orthogonal(layer)
        return square
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old: nn.Module = nn.utils.weight_norm(layer)
        return old


def squeeze_excite(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Channels weighted by what their means say."""
    dims, c = spatial(x), channels(x)
    pool: Any = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[dims]
    gate: Any = pick.one(torch.sigmoid, F.hardsigmoid)
    return Step(
        "x * gate(expand(relu(reduce(mean of x))))",
        lambda s, x, seen: x * gate(s.expand(s.reduce(pool(x, 1)).relu())),
        reduce=CONVS[dims](c, 2, 1),
        expand=CONVS[dims](2, c, 1),
    )


def branches(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Convolutions side by side, put together."""
    dims, c = spatial(x), channels(x)
    together = pick.one("cat", "add", "stack")
    ways: dict[str, Any] = {
        "cat": lambda s, x, seen: torch.cat([s.a(x), s.b(x).relu(), x], 1),
        "add": lambda s, x, seen: s.a(x) + s.b(x) + x,
        "stack": lambda s, x, seen: torch.stack([s.a(x), s.b(x)], 1).flatten(1, 2),
    }
    return Step(
        f"branches put together by {together}",
        ways[together],
        a=CONVS[dims](c, c, 1, bias=pick.maybe()),
        b=CONVS[dims](c, c, 3, padding=1, groups=pick.divisor(c)),
    )


CONVOLUTIONS: dict[str, tuple[float, Builder]] = {
    "conv": (6, conv),
    "pointwise": (2, pointwise),
    "depthwise": (2, depthwise),
    "transposed": (2, transposed),
    "unbatched": (0.4, unbatched),
    "conv_bn": (6, conv_bn),
    "linear_bn": (1, linear_bn),
    "conv_add": (4, conv_add),
    "computed_weight": (1, computed_weight),
    "tied": (1, tied),
    "parametrized": (1, parametrized),
    "squeeze_excite": (1, squeeze_excite),
    "branches": (1, branches),
}
"""By name: how often it is drawn, in proportion, and what makes it."""
