"""The parameters that decide the speed of a `fused_conv` call, and the candidate tiles for it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ampopt.kernels.fused_conv import Tile, combine_block, reference
from ampopt.kernels.pixel_layout import reads_runs, unit_of

FEW_ROWS = 8
"""Largest number of rows for which the matrix-vector kernel is tried."""

MOST = 4
"""Number of tiles that are timed at a site, the best ones by their estimates.

On an H200, of those that an opening had the time to compile, more of them made the sites of RegNetY-400MF,
EncDecMil18 and ResNeXt-50 no faster, those of MobileNetV3-small by 0.2 %, and those of EfficientNet-B0 by
0.4 % (`benchmarks/results/h200/tiles.json`; one run at c0cd432).
"""

MOST_DENSE_BESIDE = 1
"""The same of dense tiles, most of whose rows are empty where the matrix-vector kernel is tried."""

PROCESSORS = 132
"""Number of multiprocessors for which `estimate` ranks tiles: an H200's.

Other GPUs use the same candidates.
"""

_HALVES = (torch.float16, torch.bfloat16)

_TENSOR_CORE_TILES = (
    *((16, 32, 64, 2), (16, 64, 64, 4), (16, 64, 128, 4), (32, 32, 64, 4), (32, 64, 64, 4), (64, 16, 32, 4)),
    *((64, 32, 32, 4), (64, 32, 64, 4), (64, 64, 32, 4), (64, 64, 64, 4), (128, 16, 32, 4)),
    *((128, 32, 32, 4), (128, 64, 32, 4), (128, 64, 64, 4), (128, 128, 32, 8), (128, 128, 64, 8)),
    *((64, 16, 16, 4), (128, 16, 16, 4), (128, 32, 16, 4)),
)
_FLOAT_TILES = (
    (16, 32, 32, 2),
    (16, 64, 32, 4),
    (32, 32, 32, 4),
    (64, 16, 32, 4),
    (64, 32, 16, 4),
    (64, 64, 16, 8),
)
"""(rows, columns, depth, warps)."""

_IN_PLACE = (1, 1, 0, 0, 1, 1)
"""The geometry of a convolution that gives one pixel for each."""

_DEPTHWISE_TILES = ((8, 32, 2), (8, 64, 4), (16, 16, 2), (16, 32, 4), (16, 64, 4), (32, 32, 4))
_VECTOR_TILES = ((2, 512, 4), (4, 256, 4), (8, 128, 4), (16, 64, 2))
"""Of those that were timed there, at 68 sites, one of these was within 1 % of the best at 67."""


Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""x, w, b, z and s."""


@dataclasses.dataclass(frozen=True)
class Site:
    """The parameters that decide the speed of a `fused_conv` call; equal sites are measured once.

    `pixel` is the number of elements from one pixel of the input to the next. `geometry` is empty for a
    linear layer.
    """

    input_shape: tuple[int, ...]
    pixel: int
    weight_shape: tuple[int, ...]
    geometry: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    bias: bool
    add: bool
    scale: bool
    act1: str
    act2: str
    tf32: bool

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one input and one output channel."""
        return bool(self.geometry) and self.groups > 1 and self.weight_shape[:2] == (self.groups, 1)

    @property
    def taps(self) -> tuple[int, int]:
        """The kernel's height and width."""
        return (self.weight_shape[2], self.weight_shape[3]) if self.geometry else (1, 1)

    @functools.cached_property
    def rows(self) -> int:
        """Number of pixels (or rows) of the result."""
        return math.prod(self._result_shape) // self.weight_shape[0]

    @functools.cached_property
    def _result_shape(self) -> torch.Size:
        x, w = (torch.empty(shape, device="meta") for shape in (self.input_shape, self.weight_shape))
        return reference(x, w, None, None, None, self.geometry, self.groups, "", "").shape

    def random_operands(self, device: torch.device) -> Operands:
        """Random x, w, b, z, s of this shape, dtype and layout, with magnitudes typical of networks."""
        generator = torch.Generator(device).manual_seed(0)
        random = functools.partial(torch.randn, generator=generator, device=device, dtype=self.dtype)

        def pixels(shape: Sequence[int], pixel: int) -> Tensor:
            if not self.geometry:
                return random((*shape[:-1], pixel))[..., : shape[-1]]
            batch, channels, height, width = shape
            return random((batch, height, width, pixel)).permute(0, 3, 1, 2)[:, :channels]

        x = pixels(self.input_shape, self.pixel)
        w = random(self.weight_shape) / math.sqrt(math.prod(self.weight_shape[1:]))
        if self.geometry:
            w = w.contiguous(memory_format=torch.channels_last)
        b = random(self.weight_shape[0]) if self.bias else None
        z = pixels(self._result_shape, self.weight_shape[0]) if self.add else None
        s = random((self.input_shape[0], self.input_shape[1], 1, 1)) if self.scale else None
        return x, w, b, z, s

    def fits(self, tile: Tile) -> bool:
        """Whether the tile's kernel can compute this site."""
        if tile.kind == "depthwise":
            return self.is_depthwise and not self.scale
        return tile.kind == "dense" or self._is_product

    @property
    def _is_product(self) -> bool:
        """Whether every row of the result is a row of the input times the weight, with factors of its own."""
        in_place = self.taps == (1, 1) and (self.geometry or _IN_PLACE)[:4] == _IN_PLACE[:4]
        return in_place and self.groups == 1 and not (self.scale and self.rows != self.input_shape[0])

    def tiles(self) -> list[Tile]:
        """The tiles to time, the best estimate first."""
        if self.is_depthwise:
            tiles = [Tile("depthwise", r, c, warps=warps) for r, c, warps in _DEPTHWISE_TILES]
            most = 2 * max(self.rows, 8), 2 * max(self.weight_shape[0], 16)
            fitting = [tile for tile in tiles if tile.rows < most[0] and tile.cols < most[1]]
            return sorted(fitting, key=self._estimate_light)[:MOST] or tiles[:1]
        dense = sorted(self._dense_tiles(), key=self.estimate)
        if not self._is_product or self.rows > FEW_ROWS:
            return dense[:MOST]
        vectors = [Tile("vector", 1, c, d, warps=warps) for c, d, warps in _VECTOR_TILES]
        return sorted(vectors, key=self._estimate_light) + dense[:MOST_DENSE_BESIDE]

    def _dense_tiles(self) -> Iterator[Tile]:
        half = self.dtype in _HALVES
        precision = "tf32" if self.tf32 and not half else "ieee"
        blocks = _TENSOR_CORE_TILES if half or self.tf32 else _FLOAT_TILES
        most = 2 * max(self.rows, 16), 2 * max(self.weight_shape[0] // self.groups, 16)
        fitting = [
            block
            for block in blocks
            if block[0] < most[0] and block[1] < most[1] and block[2] < 2 * max(self._run, 32)
        ]
        for r, c, d, warps in fitting or blocks[:1]:
            steps = self._steps(d)
            for parts in (1, 2, 4, 8, 16):
                if parts == 1 or (steps >= 2 * parts and self._programs(r, c) * parts <= 2 * PROCESSORS):
                    stages = 1 if steps // parts < 2 else 3 if r * c * d >= 1 << 19 else 4
                    yield Tile("dense", r, c, d, parts, warps, stages, precision)

    @property
    def _run(self) -> int:
        wide = reads_runs(
            self.weight_shape[1], self.taps, self.groups, self.pixel, self.geometry or _IN_PLACE
        )
        return self.weight_shape[1] * (self.taps[1] if wide else 1)

    def _steps(self, depth: int) -> int:
        taps = math.prod(self.taps) * self.weight_shape[1] // self._run
        return taps * -(-self._run // depth)

    def _programs(self, rows: int, cols: int) -> int:
        return -(-self.rows // rows) * -(-self.weight_shape[0] // self.groups // cols) * self.groups

    def estimate(self, tile: Tile) -> float:
        """An estimate of the clock cycles, to exclude slow tiles."""
        half = self.dtype in _HALVES
        rate = 1024.0 if half else 512.0 if self.tf32 else 96.0
        step = max(220.0, tile.rows * tile.cols * tile.depth / rate)
        waves = -(-self._programs(tile.rows, tile.cols) * tile.parts // PROCESSORS)
        again = 3000.0 if tile.parts > 1 else 0.0
        return waves * (600 + step * -(-self._steps(tile.depth) // tile.parts)) + again

    def _estimate_light(self, tile: Tile) -> float:
        """The same for a tile without Tensor Cores: waves of warps times what one thread has to do."""
        programs = -(-self.rows // tile.rows) * -(-self.weight_shape[0] // tile.cols)
        waves = -(-programs * tile.warps // (16 * PROCESSORS))
        steps = math.prod(self.taps) if tile.kind == "depthwise" else -(-self.weight_shape[1] // tile.depth)
        each = tile.rows * tile.cols * tile.depth / (32 * tile.warps)
        return waves * (600 + steps * (100 + 6 * each))

    @functools.cached_property
    def least_seconds(self) -> float:
        """A lower bound of the time of any kernel: an H200's arithmetic, memory, and a launch."""
        rate = 4e14 if self.dtype in _HALVES else 2e14 if self.tf32 else 4e13
        operations = 2 * self.rows * math.prod(self.weight_shape)
        elements = (
            math.prod(self.input_shape) + math.prod(self.weight_shape) + self.rows * self.weight_shape[0]
        )
        return 2e-6 + max(operations / rate, elements * self.dtype.itemsize / 4e12)

    def compile_key(self, tile: Tile) -> object:
        """Sites and tiles with equal keys share their compiled kernels."""
        outs, channels = self.weight_shape[:2]
        units = {
            "depthwise": (unit_of(outs, self.pixel),),
            "vector": (unit_of(outs, channels, self.pixel),),
            "dense": (unit_of(channels, self.pixel), unit_of(outs // self.groups)),
        }[tile.kind]
        flags = (self.dtype, self.bias, self.add, self.scale, self.act1, self.act2)
        is_wide = self._run > channels
        if tile.parts > 1:
            return dataclasses.replace(tile, parts=2), self.taps, units, is_wide, flags, combine_block(outs)
        return tile, self.taps, units, is_wide, flags, None
