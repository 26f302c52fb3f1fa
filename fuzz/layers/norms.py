"""Normalizations, linear layers, attention and recurrent layers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.layers import convolutions
from fuzz.layers.step import Builder, Maker, Step, World, channels, features, need, spatial, weight
from fuzz.pick import Pick


def batch_norm(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A batch norm by itself."""
    return convolutions.batch_norm(1 if x.dim() == 2 else spatial(x), channels(x), pick)


def batch_statistics(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A batch norm without running statistics: it normalizes with those of the batch."""
    need(x.shape[0] > 1 or x.dim() > 2)
    dims = 1 if x.dim() == 2 else spatial(x)
    return convolutions.NORMS[dims](channels(x), track_running_stats=False, affine=pick.maybe())


def functional_batch_norm(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """`F.batch_norm` whose statistics or weight are computed."""
    c = channels(x)
    gain = pick.maybe()
    return Step(
        f"F.batch_norm(x, mean, var.exp(), {'gain + 1' if gain else None})",
        lambda s, x, seen: F.batch_norm(x, s.mean, s.var.exp(), s.gain + 1 if gain else None, None),
        mean=torch.randn(c),
        var=torch.randn(c),
        gain=weight(c),
    )


def instance_norm(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Instance normalization, with running statistics or without."""
    dims, c = spatial(x), channels(x)
    kind: Maker = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dims]
    return kind(c, affine=pick.maybe(), track_running_stats=pick.maybe(0.3), eps=pick.one(1e-5, 0.1))


def group_norm(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Group normalization."""
    c = channels(x)
    return nn.GroupNorm(pick.divisor(c), c, affine=pick.maybe(0.8), eps=pick.one(1e-5, 0.1))


def layer_norm(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Layer normalization over the last dimensions, or over channels as ConvNeXt does it."""
    features(x)
    if x.dim() == 4 and pick.maybe(0.3):
        norm = nn.LayerNorm(channels(x))
        return Step(
            "norm over channels",
            lambda s, x, seen: s.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
            norm=norm,
        )
    shape = list(x.shape[-pick.number(1, min(2, x.dim())) :])
    return nn.LayerNorm(shape, elementwise_affine=pick.maybe(0.8), bias=pick.maybe(0.8))


def other_norm(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """RMS normalization, local response normalization, F.normalize."""
    n = features(x)
    form = pick.one("rms", "local response", "normalize")
    if form == "rms":
        return nn.RMSNorm(n, eps=pick.one(None, 1e-3))
    if form == "local response":
        need(x.dim() >= 3)
        return nn.LocalResponseNorm(pick.one(2, 3))
    p, dim = pick.one(1.0, 2.0), pick.one(0, -1)
    return Step(f"F.normalize(x, {p}, {dim})", lambda s, x, seen: F.normalize(x, p, dim))


def linear(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A linear layer, perhaps with a ReLU right behind it."""
    layer = nn.Linear(features(x), pick.one(1, 3, 8, 17), bias=pick.maybe(0.7))
    return nn.Sequential(layer, nn.ReLU()) if pick.maybe(0.3) else layer


def linear_chain(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Linear layers with nothing, or nothing that counts, between them."""
    sizes = [features(x), *(pick.one(2, 5, 8, 16) for _ in range(pick.number(2, 4)))]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers.append(nn.Linear(a, b, bias=pick.maybe(0.7)))
        if pick.maybe(0.2):
            layers.append(pick.one(nn.Dropout, nn.Identity)())
    return nn.Sequential(*layers)


def product(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Matrix products by another name."""
    n = features(x)
    form = pick.one("matmul", "einsum", "bmm", "addmm", "baddbmm", "bilinear", "outer", "self", "mv")
    ways: dict[str, Any] = {
        "matmul": lambda s, x, seen: torch.matmul(x, s.w),
        "einsum": lambda s, x, seen: torch.einsum("...i,ij->...j", x, s.w),
        "bmm": lambda s, x, seen: torch.bmm(x.reshape(1, -1, n), s.w[None]),
        "addmm": lambda s, x, seen: torch.addmm(s.b, x.reshape(-1, n), s.w, beta=0.5, alpha=2),
        "baddbmm": lambda s, x, seen: torch.baddbmm(s.b, x.reshape(1, -1, n), s.w[None]),
        "bilinear": lambda s, x, seen: F.bilinear(x, x.flip(-1), s.w3, s.b3),
        "outer": lambda s, x, seen: x.unsqueeze(-1) @ s.b.unsqueeze(0) / n,
        "self": lambda s, x, seen: (x @ x.transpose(-1, -2)) / n,
        "mv": lambda s, x, seen: x @ s.b,
    }
    need(x.dim() >= 2)
    return Step(form, ways[form], w=weight(n, n), b=weight(n), w3=weight(3, n, n, scale=0.1), b3=weight(3))


def attention(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Attention: the function with its options, the module, a transformer's layer."""
    tokens = x if x.dim() == 3 else x.flatten(2).transpose(1, 2) if x.dim() > 3 else None
    if tokens is None:
        need(False)
        raise AssertionError
    need(tokens.shape[1] > 0 and tokens.shape[2] <= 32)
    width, image = tokens.shape[2], x.dim() > 3
    form = pick.one("function", "causal", "mask", "module", "layer", "scale")

    def run(s: Any, x: Tensor, seen: Any) -> Any:
        t = x.flatten(2).transpose(1, 2) if image else x
        if form == "module":
            return s.part(t, t, t, need_weights=False)[0]
        if form == "layer":
            return s.part(t)
        q, k, v = s.part(t).chunk(3, -1)
        mask = torch.ones(t.shape[1], t.shape[1], dtype=torch.bool, device=t.device).tril()
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask if form == "mask" else None,
            is_causal=form == "causal",
            scale=0.3 if form == "scale" else None,
        )

    heads = pick.divisor(width)
    parts: dict[str, Any] = {
        "module": lambda: nn.MultiheadAttention(width, heads, batch_first=True, bias=pick.maybe(0.7)),
        "layer": lambda: nn.TransformerEncoderLayer(
            width,
            heads,
            2 * width,
            batch_first=True,
            norm_first=pick.maybe(),
            activation=pick.one("relu", "gelu"),
        ),
    }
    part = parts.get(form, lambda: nn.Linear(width, 3 * width))()
    return Step(f"attention: {form}", run, part=part)


def recurrent(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """LSTM, GRU or RNN over the last dimension's features."""
    need(x.dim() == 3)
    kind: Maker = pick.one(nn.LSTM, nn.GRU, nn.RNN)
    part = kind(
        features(x),
        pick.one(2, 5),
        num_layers=pick.one(1, 1, 2),
        batch_first=pick.maybe(),
        bidirectional=pick.maybe(0.4),
        bias=pick.maybe(0.8),
    )
    return Step("recurrent layer's outputs", lambda s, x, seen: s.part(x)[0], part=part)


NORMS: dict[str, tuple[float, Builder]] = {
    "batch_norm": (3, batch_norm),
    "batch_statistics": (0.5, batch_statistics),
    "functional_batch_norm": (0.7, functional_batch_norm),
    "instance_norm": (1, instance_norm),
    "group_norm": (1, group_norm),
    "layer_norm": (1.5, layer_norm),
    "other_norm": (1, other_norm),
    "linear": (4, linear),
    "linear_chain": (3, linear_chain),
    "product": (2, product),
    "attention": (1.5, attention),
    "recurrent": (0.8, recurrent),
}
"""By name: how often it is drawn, in proportion, and what makes it."""
