"""fuse-image-conv: let a network's first convolution read the image as the caller gives it."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, fx

from ampopt.ir.graph import add_constant, constant, finish, insert_call, replace, tensor_meta
from ampopt.ir.numerics import relative_error
from ampopt.ir.pass_options import option
from ampopt.ir.program import Program
from ampopt.ir.shapes import expected_shapes
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result
from ampopt.kernels.conv_timing import PLAIN, race, run_all
from ampopt.kernels.fused_conv import ACTIVATIONS, is_available
from ampopt.kernels.image_chains import ImageChain, as_given, image_chains
from ampopt.kernels.image_conv import image_conv, packed, tiles_for

SHARE = 0.5
"""Share of the remaining time for this pass; the rest is for the passes after it."""

MOST_ERROR = 2e-2
"""Largest relative error of a tile against what is there; both round to TF32, float16 or bfloat16."""

COMPILING = 0.7
"""Share of this pass's time for compiling; the rest is for measuring."""


@dataclasses.dataclass(frozen=True)
class FuseImageConv(Pass):
    """Fuse the conversions of an image, and of a result, into the convolution between them.

    Rewrites: conv2d of an input of at most four channels, with its activation, to `ampopt::image_conv`, also
    where another pass has fused the two. It reads the caller's tensor in its own dtype and layout and writes
    the result in the dtype and the layout in which it is read, or given back. So nothing is converted at the
    program's border. Each is timed with the conversions that it saves, in the tiles of `image_conv`.
    Requires: CUDA and Triton; float16 or bfloat16, or float32 that may be rounded to TF32, for which there
    are Tensor Cores; constant weights, no groups.
    Declines: inputs with other readers; images that are rounded to a third dtype on the way; results in
    neither layout; nothing, and 2^31 elements; filters of more than 64 numbers; an addition or a factor that
    is fused already; convolutions that are not faster; in a replay, choices that are gone; programs under
    autocast.
    Correct because: an element is rounded to the weight's dtype as it is read, as the conversion rounded it,
    and the sums are of the same products. They are rounded once, to the dtype in which the result is wanted.
    A memory layout is only the order of elements in memory.
    Cost: about a second of compilation and measurement, in Triton's own cache afterwards.

    `choices` holds the measured (node's name, tile) pairs; a replay applies them without measuring.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.KERNEL
    portable = False
    shape_dependent = True

    choices: tuple[tuple[str, str], ...] | None = None
    least_gain: float = option(1.03, 0.0, 1000.0)
    seconds: float = option(4.0, 0.0, 3600.0)

    def why_not(self, program: Program) -> str | None:
        """Declines other devices: Triton compiles for CUDA."""
        if program.device.type != "cuda":
            return "its kernel needs CUDA"
        if not is_available():
            return "Triton is not installed"
        return "it still runs under autocast" if program.under_autocast else None

    def within(self, seconds: float) -> Pass:
        """Measure less if little time is left; a replay measures nothing."""
        if self.choices is not None:
            return self
        return dataclasses.replace(self, seconds=min(self.seconds, SHARE * seconds))

    def apply(self, program: Program) -> Result:
        """Match, measure (or use `choices`), rewrite; see the class."""
        module = expected_shapes(program)
        found, declined = image_chains(module, program)
        if self.choices is None:
            chosen = self._choose(module, program, found, declined)
        else:
            chosen = dict(self.choices)
        entry, taken = list(program.entry), list[ImageChain]()
        for place, chains in found.items():
            if all(chain.conv.name in chosen for chain in chains):
                entry[place] = as_given(program.examples[place])
                taken += chains
        if not taken:
            return Result(program, 0, tuple(declined))
        for chain in taken:
            _fuse(module, chain, chosen[chain.conv.name])
        frozen = dataclasses.replace(self, choices=tuple((c.conv.name, chosen[c.conv.name]) for c in taken))
        changed = program.with_graph(finish(module)).replace(entry=tuple(entry))
        return Result(changed, len(taken), tuple(declined), replay=frozen)

    def _choose(
        self,
        module: fx.GraphModule,
        program: Program,
        found: dict[int, list[ImageChain]],
        declined: list[Declined],
    ) -> dict[str, str]:
        """The fastest tile of each convolution that is faster so; the reasons of others are added."""
        chosen = dict[str, str]()
        for place, chains in found.items():
            for chain in chains:
                end = time.perf_counter() + self.seconds / len(chains)
                tile = self._fastest(module, program, place, chain, end)
                if isinstance(tile, Declined):
                    declined.append(tile)
                else:
                    chosen[chain.conv.name] = tile
        return chosen

    def _fastest(
        self, module: fx.GraphModule, program: Program, place: int, chain: ImageChain, end: float
    ) -> str | Declined:
        example, weight = program.examples[place], constant(module, chain.weight)
        assert weight is not None
        if weight.dtype is torch.float32 and not program.settings.tf32:
            return Declined(chain.conv.name, "float32 has no Tensor Cores")
        generator = torch.Generator(example.device).manual_seed(0)
        image = torch.empty_like(example).normal_(generator=generator)
        given, bias = as_given(example).convert(image), constant(module, chain.bias)
        pixels = math.prod(tensor_meta(chain.last).shape[2:])
        tiles = [str(tile) for tile in tiles_for(pixels, weight, tf32=program.settings.tf32)]
        w = packed(weight)
        ours: dict[str, Callable[[], Tensor]] = {
            tile: functools.partial(image_conv(), given, w, bias, *chain.call, tile) for tile in tiles
        }
        with program.scope():
            ready = run_all(ours, COMPILING * (end - time.perf_counter()))
            plain = functools.partial(_as_it_is, module, program, place, chain, image)
            expected = plain()
            calls = {PLAIN: plain} | {tile: ours[tile] for tile in tiles if tile in ready}

            def why_not(_: str, result: Tensor) -> str | None:
                error = relative_error(result, expected)
                return f"its error is {error:.1e}" if error > MOST_ERROR else None

            timed = race(calls, program.device, why_not)
        seconds, now = timed.seconds, timed.seconds[PLAIN]
        best = min(seconds.keys() - {PLAIN}, key=seconds.__getitem__, default=None)
        if best is not None and now / seconds[best] >= self.least_gain:
            return best
        why = next(iter(timed.refused.values()), "the time for measurements was spent")
        text = f"the best tile {1e6 * seconds[best]:.1f} µs" if best is not None else f"no tile: {why}"
        return Declined(chain.conv.name, f"as it is {1e6 * now:.1f} µs, {text}")


def _as_it_is(
    module: fx.GraphModule, program: Program, place: int, chain: ImageChain, image: Tensor
) -> Tensor:
    """The convolution with the conversions before and after it, as the program has them."""
    x = program.entry[place].convert(image).to(tensor_meta(chain.source).dtype)
    given, named = fx.map_arg(
        (chain.conv.args, dict(chain.conv.kwargs)),
        lambda node: x if node is chain.source else constant(module, node),
    )
    y: Tensor = chain.conv.target(*given, **named)  # type: ignore[operator]
    if chain.last is not chain.conv:
        y = ACTIVATIONS[chain.act](y)
    layout = torch.channels_last if chain.innermost else torch.contiguous_format
    return y.to(chain.dtype).contiguous(memory_format=layout) if chain.is_given_back else y


def _fuse(module: fx.GraphModule, chain: ImageChain, tile: str) -> None:
    weight = constant(module, chain.weight)
    assert weight is not None
    w = add_constant(module, f"{chain.conv.name}_weight", packed(weight), chain.conv)
    new = insert_call(module, chain.last, image_conv(), chain.image, w, chain.bias, *chain.call, tile)
    replace(chain.last, new)
