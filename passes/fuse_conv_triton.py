"""fuse-conv-triton: fuse convolutions and linear layers with their epilogues into Triton kernels."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import fx

from ampopt.ir.deciding_calls import deciding_node
from ampopt.ir.graph import (
    add_constant,
    arguments,
    aten,
    constant,
    finish,
    insert_call,
    reads_strides,
    replace,
    where,
)
from ampopt.ir.origin import carry_on
from ampopt.ir.pass_options import option
from ampopt.ir.program import Program
from ampopt.ir.shapes import expected_shapes
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result
from ampopt.kernels import conv_timing
from ampopt.kernels.conv_chains import Chain, find_chains
from ampopt.kernels.conv_tiles import Site
from ampopt.kernels.conv_timing import BY_CUDNN, PLAIN, Timed
from ampopt.kernels.fused_conv import Tile, fused_conv, is_available
from ampopt.kernels.group_forms import merge_groups
from ampopt.kernels.layouts import in_channels_last
from ampopt.kernels.pixel_layout import in_order, packed_depthwise

SHARE = 0.5
"""Share of the remaining time for this pass; the rest is for the passes after it."""

COMPILING = 0.6
"""Share of this pass's time for compiling; the rest is for measuring."""

PREPARED = 0.3
"""The same where other processes had compiled ahead of it."""

AHEAD_S = 20.0
"""Seconds of compiling in other processes, at the most, ahead of this pass."""


@dataclasses.dataclass(frozen=True)
class FuseConvTriton(Pass):
    """Fuse `act(act(conv(x * s) + b) + z)` into one Triton kernel, wherever that is measured to be faster.

    Rewrites: conv2d and linear with constant weights, with the activation, the addition of a tensor of the
    same shape, and the activation that follow, to `ampopt::fused_conv`; before a 1x1 convolution also the
    multiplication with one number a channel (squeeze-and-excite). Groups of few channels are computed several
    at a time. The program is converted to channels_last first, as by the pass of that name, because the
    kernels read this format, and both together may gain where the format alone loses. Each chain is timed at
    its real shape, dtype and layout, in the tiles of `conv_tiles`, against the same operators one after
    another and against cuDNN's fused form; where both lose infinities that PyTorch's usual layout keeps, as
    cuDNN does for three channels in float16, it gets the fastest tile. Depthwise convolutions get the fastest
    tile, or the likeliest one where the time for measurements is over: cuDNN would first compile a kernel for
    each of them, for up to 0.9 s; where it was measured it was slower in float16, and never faster by more
    than a tenth in float32 (`benchmarks/depthwise.py`). Where values decide, groups are not computed
    together: NaN of one reaches the others.
    Requires: CUDA and Triton; float32, float16 or bfloat16; feature maps with the channel innermost.
    Declines: other layouts and dtypes; intermediate results with other readers; chains without a gain, or
    after the time for measurements; in a replay, choices that do not fit the shape; programs under autocast.
    Correct because: the kernel computes the same sums of the same products; what is fused reads the sums
    before they are rounded, so that fewer roundings happen. Groups computed together have zeros for each
    other's weights. z and s are computed before the fused call, which stands in the last node's place. Shapes
    are told without a run; strides that turn out otherwise are read, or copied, by the call itself.
    Cost: seconds of compilation and measurement, in Triton's own cache afterwards.

    `choices` holds the measured (node's name, tile) pairs; a replay applies them without measuring. They are
    measured within `seconds`, of which the share `compiling` is for compiling.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.KERNEL
    portable = False
    shape_dependent = True

    choices: tuple[tuple[str, str], ...] | None = None
    least_gain: float = option(1.03, 0.0, 1000.0)
    seconds: float = option(6.0, 0.0, 3600.0)
    compiling: float = option(COMPILING, 0.0, 1.0)

    def why_not(self, program: Program) -> str | None:
        """Declines other devices (Triton compiles for CUDA), and programs that read memory by strides."""
        if program.device.type != "cuda":
            return "its kernels need CUDA"
        if not is_available():
            return "Triton is not installed"
        if (found := reads_strides(program.graph)) is not None:
            return f"{where(found)} reads memory by its strides"
        return "it still runs under autocast" if program.under_autocast else None

    def within(self, seconds: float) -> Pass:
        """Measure less if little time is left; a replay measures nothing."""
        if self.choices is not None:
            return self
        return dataclasses.replace(self, seconds=min(self.seconds, SHARE * seconds))

    def preparations(self, program: Program, count: int) -> Sequence[Callable[[], object]]:
        """Compiling the tiles that would be measured."""
        if self.choices is not None or self.why_not(program) is not None:
            return ()
        sites = _dearest_first(_found(expected_shapes(in_channels_last(program).program), program)[0])
        shares = [sites[place::count] for place in range(min(count, len(sites)))]
        return [partial(conv_timing.compile_all, share, program.device, AHEAD_S) for share in shares]

    def prepared(self) -> Pass:
        """Little is left to compile."""
        return dataclasses.replace(self, compiling=PREPARED)

    def apply(self, program: Program) -> Result:
        """Match, measure (or use `choices`), rewrite; see the class."""
        end = time.perf_counter() + self.seconds
        laid = in_channels_last(program).program
        module = expected_shapes(laid)
        chains, declined = _found(module, program)
        if self.choices is None:
            chosen, more = self._choose(chains, program, end)
        else:
            chosen, more = _that_fit(dict(self.choices), chains)
        declined += more
        taken = [chain for chain in chains if chain.conv.name in chosen]
        if not taken:
            return Result(program, 0, tuple(declined))
        moved: dict[fx.Node, fx.Node] = {}
        for chain in taken:
            moved[chain.last] = _fuse(module, chain, chosen[chain.conv.name], moved)
        frozen = dataclasses.replace(self, choices=tuple((c.conv.name, chosen[c.conv.name]) for c in taken))
        changed = laid.with_graph(finish(module))
        return Result(changed, len(taken), tuple(declined), replay=frozen)

    def _choose(
        self, chains: Sequence[Chain], program: Program, end: float
    ) -> tuple[dict[str, str], list[Declined]]:
        """The fastest tile of each chain for which one is faster than what is there."""
        declined, chosen, known = list[Declined](), dict[str, str](), dict[Site, Timed]()
        sites = _dearest_first(chains)
        compiling = self.compiling * (end - time.perf_counter())
        ready = conv_timing.compile_all(sites, program.device, compiling)
        rest = (1 - COMPILING) * self.seconds
        end = max(end, time.perf_counter() + rest)  # what it has compiled is measured
        for site in sites:
            tiles = [tile for tile in site.tiles() if site.compile_key(tile) in ready]
            if tiles and time.perf_counter() < end:
                known[site] = conv_timing.fastest(site, tiles, program.device, program.settings)
        for chain in chains:
            name, site = chain.conv.name, chain.site
            if site not in known:
                likeliest = next((tile for tile in site.tiles() if site.compile_key(tile) in ready), None)
                if site.is_depthwise and likeliest is not None:
                    chosen[name] = str(likeliest)
                    continue
                declined.append(Declined(name, "the time for measurements was spent"))
                continue
            seconds, refused = known[site].seconds, known[site].refused
            ours = {tile: t for tile, t in seconds.items() if tile not in (PLAIN, BY_CUDNN)}
            now = min((t for way, t in seconds.items() if way not in ours), default=math.inf)
            best = min(ours, key=ours.__getitem__, default=None)
            if best is not None and now / ours[best] >= self.least_gain:
                chosen[name] = best
            else:
                reason = next((why for tile, why in refused.items() if tile != BY_CUDNN), "there is none")
                text = f"{1e6 * ours[best]:.1f} µs" if best is not None else f"fails: {reason}"
                as_it_is = f"as it is {1e6 * now:.1f} µs, " if math.isfinite(now) else ""
                declined.append(Declined(name, f"{as_it_is}the best tile {text}"))
        return chosen, declined


def _found(module: fx.GraphModule, program: Program) -> tuple[list[Chain], list[Declined]]:
    return find_chains(module, program.settings.tf32, merges=deciding_node(module) is None)


def _dearest_first(chains: Sequence[Chain]) -> list[Site]:
    """The sites of the chains, those first that take most of the time."""
    counts = Counter(chain.site for chain in chains)
    return sorted(counts, key=lambda site: -counts[site] * site.least_seconds)


def _that_fit(choices: dict[str, str], chains: Sequence[Chain]) -> tuple[dict[str, str], list[Declined]]:
    """The choices whose kernels can compute what is here; they may have been made at another shape."""
    here = [(chain, choices[chain.conv.name]) for chain in chains if chain.conv.name in choices]
    fitting = {chain.conv.name: text for chain, text in here if chain.site.fits(Tile.parse(text))}
    names = [chain.conv.name for chain, _ in here if chain.conv.name not in fitting]
    return fitting, [Declined(name, "the tile that was chosen does not fit this shape") for name in names]


def _fuse(module: fx.GraphModule, chain: Chain, tile: str, moved: dict[fx.Node, fx.Node]) -> fx.Node:
    """Put the fused call in the place of a chain; `moved` tells what stands for results of earlier chains."""
    own, site = arguments(chain.conv), chain.site
    weight = constant(module, own["weight"])
    assert weight is not None
    groups = own["groups"] if site.geometry else 1
    if groups != site.groups:
        weight = merge_groups(weight, groups, groups // site.groups)
    is_image, is_depthwise = bool(site.geometry), Tile.parse(tile).kind == "depthwise"
    weight = packed_depthwise(weight) if is_depthwise else in_order(weight, is_image=is_image)
    w = add_constant(module, f"{chain.conv.name}_weight", weight, chain.conv)
    source = moved.get(chain.source, chain.source)
    if chain.reorder:
        source = _reordered(module, source, chain.last)
    add, scale = (node and moved.get(node, node) for node in (chain.add, chain.scale))
    call = (source, w, own["bias"], add, scale, list(site.geometry), site.groups)
    new = insert_call(module, chain.last, fused_conv(), *call, site.act1, site.act2, tile)
    new.meta["tensor_meta"] = chain.last.meta["tensor_meta"]  # another chain may add this result
    replace(chain.last, new)
    return new


def _reordered(module: fx.GraphModule, source: fx.Node, reader: fx.Node) -> fx.Node:
    """A copy of an image with its channels innermost, one for all that read it after that."""
    for user in source.users:
        is_copy = user.target is aten.clone.default
        if is_copy and user.kwargs.get("memory_format") is torch.channels_last and user < reader:
            return user
    place = source.next
    while place.op in ("placeholder", "get_attr"):
        place = place.next
    copied = insert_call(module, place, aten.clone.default, source, memory_format=torch.channels_last)
    carry_on(copied, source)
    return copied
