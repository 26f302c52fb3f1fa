"""Views, copies, pooling, resizing, reductions: whatever changes a tensor's shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.layers.convolutions import CONVS
from fuzz.layers.step import Builder, Maker, Step, World, channels, features, need, spatial
from fuzz.pick import Pick

Way = tuple[str, Any]


def max_pool(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Max pooling, with dilation, odd sizes and ceiling."""
    kind: Maker = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[spatial(x)]
    return kind(
        pick.one(2, 3),
        stride=pick.one(None, 1, 2),
        padding=pick.one(0, 1),
        dilation=pick.one(1, 1, 2),
        ceil_mode=pick.maybe(),
    )


def unpool(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Max pooling with indices, a layer between, and unpooling."""
    dims, c = spatial(x), channels(x)
    pool: Maker = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims]
    back: Maker = {1: nn.MaxUnpool1d, 2: nn.MaxUnpool2d, 3: nn.MaxUnpool3d}[dims]
    between = CONVS[dims](c, c, 1) if pick.maybe() else nn.Identity()

    def run(s: Any, x: Tensor, seen: Any) -> Any:
        y, indices = s.pool(x)
        return s.back(s.between(y), indices, output_size=x.shape[2:])

    return Step(
        "unpool(layer(pool(x)))", run, pool=pool(2, return_indices=True), back=back(2), between=between
    )


def average_pool(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Average pooling with odd options."""
    dims = spatial(x)
    kind: Maker = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}[dims]
    more: dict[str, Any] = {"ceil_mode": pick.maybe(), "count_include_pad": pick.maybe()}
    if dims > 1:
        more["divisor_override"] = pick.one(None, None, 3)
    return kind(pick.one(2, 3), stride=pick.one(None, 1), padding=pick.one(0, 1), **more)


def adaptive_pool(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Adaptive pooling, of averages or maxima, to sizes that do not divide."""
    dims = spatial(x)
    average: dict[int, Maker] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
    largest: dict[int, Maker] = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}
    size: Any = pick.one(1, 2, 3) if dims == 1 or pick.maybe() else (1, None, 2)[:dims]
    if pick.maybe(0.15):
        need(dims == 2)
        return nn.LPPool2d(2, 2)
    return pick.one(average, largest)[dims](size)


def resize(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Interpolation in every mode."""
    dims = spatial(x)
    smooth = {1: "linear", 2: pick.one("bilinear", "bicubic"), 3: "trilinear"}[dims]
    mode = pick.one("nearest", "nearest-exact", "area", smooth, smooth)
    more: dict[str, Any] = {"align_corners": pick.maybe()} if mode == smooth else {}
    if mode == "bilinear" and pick.maybe(0.2):
        more["antialias"] = True
    if pick.maybe():
        more["scale_factor"] = pick.one(2, 0.5, 1.5) if mode != "area" else 2
    else:
        more["size"] = tuple(pick.number(1, 7) for _ in range(dims))
    return Step(f"interpolate({mode!r}, {more})", lambda s, x, seen: F.interpolate(x, mode=mode, **more))


def shuffle(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Pixels and channels in another order; patches."""
    need(x.dim() == 4)
    c = channels(x)
    makers: list[Maker] = [
        lambda: nn.PixelShuffle(2),
        lambda: nn.PixelUnshuffle(2),
        lambda: nn.ChannelShuffle(pick.divisor(c)),
        lambda: nn.Unfold(2, padding=1),
        lambda: nn.ZeroPad2d((1, 0, 2, -1)),
    ]
    return pick.one(*makers)()


def pad(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Padding in every mode, with negative amounts too."""
    need(x.dim() >= 2)
    mode = pick.one("constant", "constant", "reflect", "replicate", "circular")
    amounts = [
        pick.number(-1 if mode == "constant" else 0, 2) for _ in range(2 * min(2, max(x.dim() - 2, 1)))
    ]
    value = pick.one(0.0, 1.5) if mode == "constant" else None
    return Step(f"F.pad(x, {amounts}, {mode!r}, {value})", lambda s, x, seen: F.pad(x, amounts, mode, value))


def view(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Views, reshapes and transposes; functions of the shape."""
    need(x.dim() > 0)
    last = x.dim() - 1
    a, b = pick.number(0, last), pick.number(0, last)
    order = sorted(range(x.dim()), key=lambda _: pick.fraction())
    ways: list[Way] = [
        ("flatten(1)", lambda s, x, seen: x.flatten(1) if x.dim() > 1 else x),
        ("flatten(0, 1)", lambda s, x, seen: x.flatten(0, 1)),
        ("view(shape[0], -1)", lambda s, x, seen: x.view(x.shape[0], -1)),
        ("reshape(-1, shape[-1])", lambda s, x, seen: x.reshape(-1, x.shape[-1])),
        (f"transpose({a}, {b})", lambda s, x, seen: x.transpose(a, b)),
        (f"permute({order})", lambda s, x, seen: x.permute(order)),
        (f"permute({order}).contiguous()", lambda s, x, seen: x.permute(order).contiguous()),
        (f"unsqueeze({a})", lambda s, x, seen: x.unsqueeze(a)),
        ("squeeze()", lambda s, x, seen: x.squeeze()),
        (f"squeeze({a})", lambda s, x, seen: x.squeeze(a)),
        (f"movedim({a}, {b})", lambda s, x, seen: x.movedim(a, b)),
        (f"unflatten({a})", lambda s, x, seen: x.unflatten(a, (1, -1))),
        ("swapaxes and view", lambda s, x, seen: x.reshape(x.shape).swapaxes(a, b)),
        ("view_as", lambda s, x, seen: x.reshape(-1).view_as(x)),
        (f"expand at {a}", lambda s, x, seen: x.unsqueeze(a).expand(*x.shape[:a], 2, *x.shape[a:])),
        ("identity reshape", lambda s, x, seen: x.reshape(x.shape)),
        ("contiguous()", lambda s, x, seen: x.contiguous()),
        ("x * shape[0] / numel", lambda s, x, seen: x * x.shape[0] / max(x.numel(), 1)),
        ("if shape[-1] > 3", lambda s, x, seen: x * 2 if x.shape[-1] > 3 else x - 1),
        ("x + arange(shape[-1])", lambda s, x, seen: x + torch.arange(x.shape[-1], device=x.device).to(x)),
        ("x / len(x)", lambda s, x, seen: x / max(len(x), 1)),
        ("channels_last", lambda s, x, seen: x.contiguous(memory_format=torch.channels_last) * 1.5),
        ("unfold", lambda s, x, seen: x.unfold(-1, 2, 1)),
        ("diagonal", lambda s, x, seen: x.diagonal(dim1=-2, dim2=-1)),
    ]
    words, function = pick.one(*ways)
    return Step(words, function)


def parts(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A tensor in parts, and parts put together."""
    need(x.dim() > 0)
    dim = pick.number(0, x.dim() - 1)
    ways: list[Way] = [
        (f"cat of split({dim})", lambda s, x, seen: torch.cat(x.split(2, dim)[::-1], dim)),
        (f"chunk({dim}) added", lambda s, x, seen: sum(x.chunk(max(x.shape[dim], 1), dim))),
        (f"unbind({dim}) stacked", lambda s, x, seen: torch.stack(x.unbind(dim)[::-1], -1)),
        (f"narrow({dim})", lambda s, x, seen: x.narrow(dim, x.shape[dim] // 2, (x.shape[dim] + 1) // 2)),
        (f"select({dim})", lambda s, x, seen: x.select(dim, -1)),
        ("x[..., ::2]", lambda s, x, seen: x[..., ::2]),
        ("x[..., 1:]", lambda s, x, seen: x[..., 1:]),
        ("x[:, None]", lambda s, x, seen: x[:, None]),
        (f"flip({dim})", lambda s, x, seen: x.flip(dim)),
        (f"roll(1, {dim})", lambda s, x, seen: x.roll(1, dim)),
        (f"cat twice({dim})", lambda s, x, seen: torch.cat([x, x], dim)),
        ("cat one", lambda s, x, seen: torch.cat([x], dim)),
        (f"cat empty({dim})", lambda s, x, seen: torch.cat([x, x.narrow(dim, 0, 0)], dim)),
        (f"index_select({dim})", lambda s, x, seen: x.index_select(dim, s.index)),
        ("x[index]", lambda s, x, seen: x[s.index]),
        ("x[..., [0, 0]]", lambda s, x, seen: x[..., [0, 0]]),
        (f"gather({dim})", lambda s, x, seen: x.gather(dim, torch.zeros_like(x, dtype=torch.long))),
        ("repeat", lambda s, x, seen: x.repeat(*[1] * (x.dim() - 1), 2)),
        ("repeat_interleave", lambda s, x, seen: x.repeat_interleave(2, dim)),
        ("tile", lambda s, x, seen: x.tile(2)),
        (
            "scatter_add",
            lambda s, x, seen: torch.zeros_like(x).scatter_add(dim, torch.zeros_like(x).long(), x),
        ),
        ("tensor_split", lambda s, x, seen: torch.cat(x.tensor_split(3, dim), dim)),
    ]
    words, function = pick.one(*ways)
    return Step(words, function, index=torch.tensor([0, 0]))


def reduction(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Sums, means, extremes and scans; all dimensions or one, kept or not."""
    need(x.dim() > 0)
    dim, keep = pick.number(-x.dim(), x.dim() - 1), pick.maybe(0.7)
    ways: list[Way] = [
        ("mean", lambda s, x, seen: x.mean(dim, keepdim=keep)),
        ("sum", lambda s, x, seen: x.sum(dim, keepdim=keep)),
        ("var", lambda s, x, seen: x.var(dim, unbiased=False, keepdim=keep)),
        ("std", lambda s, x, seen: (x + 1e-2).std(dim, unbiased=False, keepdim=keep)),
        ("amax", lambda s, x, seen: x.amax(dim, keepdim=keep)),
        ("min", lambda s, x, seen: x.min(dim, keepdim=keep).values),
        ("norm", lambda s, x, seen: x.norm(dim=dim, keepdim=keep)),
        ("logsumexp", lambda s, x, seen: x.logsumexp(dim, keepdim=keep)),
        ("prod", lambda s, x, seen: x.tanh().prod(dim, keepdim=keep)),
        ("x - mean", lambda s, x, seen: x - x.mean(dim, keepdim=True)),
        ("x / (amax abs + 1)", lambda s, x, seen: x / (x.abs().amax(dim, keepdim=True) + 1)),
        ("cumsum", lambda s, x, seen: x.cumsum(dim)),
        ("cummax", lambda s, x, seen: x.cummax(dim).values),
        ("sort", lambda s, x, seen: x.sort(dim).values),
        ("topk", lambda s, x, seen: x.topk(1, dim).values),
        ("median", lambda s, x, seen: x.median(dim, keepdim=keep).values),
        ("global mean", lambda s, x, seen: x.mean()),
        ("x + global max", lambda s, x, seen: x + x.max()),
        ("argmax as numbers", lambda s, x, seen: x.argmax(dim, keepdim=keep).to(x.dtype)),
        (
            "var_mean",
            lambda s, x, seen: (lambda v: (x - v[1]) / (v[0] + 0.1))(
                torch.var_mean(x, dim, keepdim=True, unbiased=False)
            ),
        ),
        ("cosine", lambda s, x, seen: F.cosine_similarity(x, x.flip(0) + 1, dim=dim)),
        ("cdist", lambda s, x, seen: torch.cdist(x, x + 1)),
    ]
    words, function = pick.one(*ways)
    return Step(f"{words}, dim {dim}, keepdim {keep}", function)


def sampling(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Grid sampling, Fourier transforms, complex numbers on the way."""
    features(x)
    ways: list[Way] = [
        ("grid_sample", lambda s, x, seen: F.grid_sample(x, _grid(x), align_corners=False)),
        (
            "grid_sample nearest",
            lambda s, x, seen: F.grid_sample(
                x, _grid(x), mode="nearest", padding_mode="border", align_corners=True
            ),
        ),
        ("abs of rfft", lambda s, x, seen: torch.fft.rfft(x).abs()),
        ("irfft of rfft", lambda s, x, seen: torch.fft.irfft(torch.fft.rfft(x), n=x.shape[-1])),
        (
            "as complex",
            lambda s, x, seen: torch.view_as_real(torch.complex(x.float(), -x.float()) * 1j).sum(-1).to(x),
        ),
    ]
    words, function = pick.one(*ways)
    return Step(words, function)


def _grid(x: Tensor) -> Tensor:
    theta = torch.tensor([[0.9, 0.1, 0.05], [-0.1, 0.8, 0.1]], device=x.device, dtype=x.dtype)
    return F.affine_grid(theta.expand(x.shape[0], 2, 3), list(x.shape), align_corners=False)


SHAPES: dict[str, tuple[float, Builder]] = {
    "max_pool": (2, max_pool),
    "unpool": (1, unpool),
    "average_pool": (1.5, average_pool),
    "adaptive_pool": (1, adaptive_pool),
    "resize": (1.5, resize),
    "shuffle": (1, shuffle),
    "pad": (1.5, pad),
    "view": (4, view),
    "parts": (4, parts),
    "reduction": (2.5, reduction),
    "sampling": (0.5, sampling),
}
"""By name: how often it is drawn, in proportion, and what makes it."""
