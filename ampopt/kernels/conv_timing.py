"""Measures the fastest tile of `fused_conv` for one site of a network."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any

import torch
from torch import Tensor

from ampopt.engines.graph_capture import capture_calls
from ampopt.errors import first_line
from ampopt.ir.numerics import relative_error
from ampopt.ir.settings import Settings
from ampopt.kernels.conv_tiles import Operands, Site
from ampopt.kernels.fused_conv import Tile, fused_conv, reference
from ampopt.measure.clocks import device_time
from ampopt.measure.sampling import interleave

AT_ONCE = 10
"""Number of launches in a measurement's CUDA graph, so that the graph's start time matters little."""

SAMPLE_S = 5e-4
"""Seconds of one sample."""

NEAR = 1.2
"""A tile whose first sample is this many times the shortest one is not sampled again."""

COMPILERS = min(8, os.cpu_count() or 1)

PLAIN, BY_CUDNN = "as it is", "by cuDNN"
"""The alternatives to a tile: separate operators one after another, or cuDNN's fused operator."""

Way = Callable[[Site, Operands], Tensor]


@dataclasses.dataclass(frozen=True)
class Timed:
    """The results for a site, by tile or alternative: device seconds of one call, or why there is no time."""

    seconds: dict[str, float]
    refused: dict[str, str]


def launch(site: Site, operands: Operands, tile: Tile) -> Tensor:
    """One call of the operator."""
    result: Tensor = fused_conv()(
        *operands, list(site.geometry), site.groups, site.act1, site.act2, str(tile)
    )
    return result


def compile_all(sites: Iterable[Site], device: torch.device, seconds: float) -> set[object]:
    """Compile the tiles of all sites, several in parallel, for at most this many seconds.

    The first tile of every site is compiled before the second of any, so that each site has some if time is
    short. Returns the `Site.compile_key` of the compiled ones; a failure here is repeated and reported when
    timed.
    """
    jobs: dict[object, Callable[[], Tensor]] = {}
    tiles = [(site, site.tiles()) for site in sites]
    for rank in range(max((len(found) for _, found in tiles), default=0)):
        for site, found in tiles:
            if rank < len(found):
                job = functools.partial(_launch_random, site, found[rank], device)
                jobs.setdefault(site.compile_key(found[rank]), job)
    return run_all(jobs, seconds)


def run_all(jobs: Mapping[Any, Callable[[], object]], seconds: float) -> set[object]:
    """Make calls that compile kernels, several in parallel, for at most this many seconds.

    Returns the keys of those that are over; a failure is repeated and reported when the call is timed.
    """
    done: set[object] = set()

    def quietly(key: object) -> None:
        with contextlib.suppress(Exception):
            jobs[key]()
        done.add(key)

    pool = futures.ThreadPoolExecutor(COMPILERS)
    try:
        with contextlib.suppress(futures.TimeoutError):
            list(pool.map(quietly, jobs, timeout=seconds))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return done


def _launch_random(site: Site, tile: Tile, device: torch.device) -> Tensor:
    return launch(site, site.random_operands(device), tile)


def fastest(
    site: Site, tiles: Sequence[Tile], device: torch.device, settings: Settings, seconds: float = 0.02
) -> Timed:
    """Time a site's `tiles`, `PLAIN`, and `BY_CUDNN` if cuDNN has that form.

    Tiles that this GPU cannot run, or whose results differ from PyTorch's, are left out. So is what loses
    infinities that the same operators keep in PyTorch's usual layout, as cuDNN's kernels for images of three
    channels in float16 do: no program may serve it. Of depthwise convolutions only tiles are timed, see
    `FuseConvTriton`.
    """
    with settings.scope(device):
        operands = site.random_operands(device)
        ways = {} if site.is_depthwise else _other_ways(site)
        calls = {name: functools.partial(run, site, operands) for name, run in ways.items()}
        expected = _plain(site, _contiguous(operands) if site.is_depthwise else operands)
        loses_infinities = _infinities(site, operands)
        limit = 1e-4 if site.dtype is torch.float32 and not site.tf32 else 2e-2
        for tile in tiles:
            calls[str(tile)] = functools.partial(launch, site, operands, tile)

        def why_not(name: str, result: Tensor) -> str | None:
            if (error := relative_error(result, expected)) > limit:
                return f"its error is {error:.1e}"
            return "it loses infinities" if name in ways and loses_infinities(ways[name]) else None

        return race(calls, device, why_not, seconds)


def race(
    calls: Mapping[str, Callable[[], Tensor]],
    device: torch.device,
    why_not: Callable[[str, Tensor], str | None],
    seconds: float = 0.02,
) -> Timed:
    """Time calls on a device in turn, each repeated in a CUDA graph.

    Left out are those whose first sample is much slower, those that fail, and those for whose result
    `why_not` gives a reason. An error of `PLAIN` is raised.
    """
    samplers, alive, refused = {}, [], dict[str, str]()
    for name, call in calls.items():
        try:
            if (reason := why_not(name, call())) is not None:
                refused[name] = reason
                continue
            graph = capture_calls(functools.partial(_repeat, call), warm_ups=0)[0]
        except Exception as failure:  # no room for a tile on this GPU, or nothing that cuDNN fuses
            if name == PLAIN:
                raise
            refused[name] = first_line(failure)
            continue
        alive.append(graph)
        samplers[name] = device_time(graph.replay, device, sample_s=SAMPLE_S)
    if not samplers:
        return Timed({}, refused)
    once = {name: sampler() for name, sampler in samplers.items()}
    near = NEAR * min(once.values())
    first = min(once.keys() - {PLAIN, BY_CUDNN}, key=once.__getitem__, default=PLAIN)
    kept = (PLAIN, BY_CUDNN, first)
    promising = {name: s for name, s in samplers.items() if once[name] <= near or name in kept}
    timed = interleave(promising, seconds=seconds, least=4, most=20)
    return Timed({name: measured.median / AT_ONCE for name, measured in timed.items()}, refused)


def _repeat(call: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    for _ in range(AT_ONCE):
        result = call()
    return (result,)


def _other_ways(site: Site) -> dict[str, Way]:
    ways: dict[str, Way] = {PLAIN: _plain}
    acts = (site.act1, site.add, site.act2)
    if site.geometry and not site.scale and acts in (("relu", False, ""), ("", True, "relu")):
        ways[BY_CUDNN] = _by_cudnn
    return ways


def _contiguous(operands: Operands) -> Operands:
    """The same with images in PyTorch's usual layout, whose kernels an original has loaded already."""
    x, w, *others = operands
    b, z, s = (None if t is None else t.contiguous() for t in others)
    return x.contiguous(), w.contiguous(), b, z, s


def _infinities(site: Site, operands: Operands) -> Callable[[Way], bool]:
    """Tells whether a way makes finite results of one infinite element, where the usual layout does not."""

    @functools.cache
    def infinite() -> tuple[Operands, Tensor]:
        x = operands[0].clone()
        x[tuple(size // 2 for size in x.shape)] = math.inf
        given = (x, *operands[1:])
        return given, _plain(site, _contiguous(given)).isfinite()

    def are_lost(way: Way) -> bool:
        given, finite = infinite()
        return bool((way(site, given).isfinite() & ~finite).any())

    return are_lost


def _plain(site: Site, operands: Operands) -> Tensor:
    return reference(*operands, site.geometry, site.groups, site.act1, site.act2)


def _by_cudnn(site: Site, operands: Operands) -> Tensor:
    x, w, b, z, _ = operands
    border = (site.geometry[:2], site.geometry[2:4], site.geometry[4:], site.groups)
    if z is None:
        return torch.cudnn_convolution_relu(x, w, b, *border)
    return torch.cudnn_convolution_add_relu(x, w, z, 1.0, b, *border)
