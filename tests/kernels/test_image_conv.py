"""The operator `ampopt::image_conv` against PyTorch's operators on a GPU, and the tiles that it may have.

`test_interpreted` has the same cases on the CPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampopt.ir.numerics import relative_error
from ampopt.kernels.fused_conv import ACTIVATIONS, Tile
from ampopt.kernels.image_conv import image_conv, packed, reference, tiles_for

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LIMITS = {FP32: 1e-5, FP16: 3e-3, BF16: 2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: image [batch, channels, height, width], weight [outs, channels, *taps]."""

    image: tuple[int, int, int, int] = (2, 3, 9, 10)
    outs: int = 8
    taps: tuple[int, int] = (3, 3)
    geometry: tuple[int, ...] = (2, 2, 1, 1, 1, 1)
    act: str = ""
    bias: bool = True
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (FP32, FP32, FP32)
    """Of the image, the weight and the result."""
    innermost: bool = False
    order: tuple[int, int, int, int] = (0, 1, 2, 3)
    """The dimensions of the image, the outermost in memory first."""
    tile: str = "image:16:16:32:1:4:1:ieee"
    special: float = 0.0
    """One element of the image, if it is not zero."""

    def error(self, device: str = "cpu") -> float:
        """The relative error as a share of the limit; infinite where the result is another kind of tensor."""
        generator = torch.Generator().manual_seed(0)
        back = [self.order.index(dim) for dim in range(4)]
        x = torch.randn([self.image[dim] for dim in self.order], generator=generator).permute(back)
        if self.special:
            x[0, 0, 1, 1] = self.special
        w = torch.randn((self.outs, self.image[1], *self.taps), generator=generator) / 4
        b = torch.randn(self.outs, generator=generator) if self.bias else None
        given_dtype, dtype, wanted = self.dtypes
        x, w = x.to(device, given_dtype), w.to(device, dtype)
        b = None if b is None else b.to(device, dtype)
        call = list(self.geometry), self.act
        y = image_conv()(x, w, b, *call, wanted, self.innermost, self.tile)
        rounded = x.to(dtype).double()
        expected = reference(
            rounded, w.double(), None if b is None else b.double(), *call, torch.float64, self.innermost
        )
        meta = [None if t is None else t.to("meta") for t in (x, w, b)]
        fake = image_conv()(*meta, *call, wanted, self.innermost, self.tile)
        if (y.shape, y.dtype, y.stride()) != (fake.shape, fake.dtype, fake.stride()):
            return float("inf")
        if y.dtype is not wanted or _strides(y) != _strides(expected):
            return float("inf")
        return relative_error(y, expected) / max(LIMITS[dtype], LIMITS[wanted])


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that decide where elements are."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


CASES: dict[str, Case] = {
    **{kind or "no activation": Case(act=kind) for kind in ACTIVATIONS},
    "rounded to float16": Case(dtypes=(FP32, FP16, FP32)),
    "float16 throughout": Case(dtypes=(FP16, FP16, FP16), innermost=True, act="relu"),
    "float16 in, float32 out": Case(dtypes=(FP16, FP32, FP32)),
    "channels innermost before and after": Case(innermost=True, order=(0, 2, 3, 1)),
    "any order": Case(order=(3, 1, 0, 2)),
    "a patch": Case((1, 4, 16, 16), 20, (8, 8), (8, 8, 0, 0, 1, 1), tile="image:16:32:64:1:4:3:ieee"),
    "seven taps": Case((1, 3, 15, 11), 12, (7, 7), (2, 2, 3, 3, 1, 1), "relu", innermost=True),
    "unequal": Case((2, 2, 11, 9), 5, (2, 4), (1, 2, 2, 0, 3, 1), "silu", bias=False),
    "one channel, one tap": Case((1, 1, 3, 5), 1, (1, 1), (1, 1, 1, 2, 1, 1)),
    "several images in a tile": Case((5, 3, 4, 5), 16, tile="image:64:16:32:1:4:1:ieee"),
    "NaN": Case(special=torch.nan, act="relu"),
    "an infinity": Case(special=torch.inf, dtypes=(FP32, FP16, FP32)),
    "what float16 cannot hold": Case(special=1e5, dtypes=(FP32, FP16, FP32)),
}


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    taps = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    size = [dilation[d] * (taps[d] - 1) + draw(st.integers(1, 4)) for d in (0, 1)]
    steps = [draw(st.integers(1, 3)) for _ in range(2)]
    tile = Tile(
        "image",
        draw(st.sampled_from([16, 32])),
        draw(st.sampled_from([16, 32])),
        draw(st.sampled_from([16, 64])),
    )
    return Case(
        (draw(st.integers(1, 3)), draw(st.integers(1, 4)), size[0], size[1]),
        draw(st.integers(1, 20)),
        taps,
        (*steps, draw(st.integers(0, 2)), draw(st.integers(0, 2)), *dilation),
        draw(st.sampled_from(list(ACTIVATIONS))),
        draw(st.booleans()),
        draw(st.tuples(*[st.sampled_from([FP32, FP16])] * 3)),  # the interpreter has no bfloat16
        draw(st.booleans()),
        draw(st.sampled_from([(0, 1, 2, 3), (0, 2, 3, 1), (1, 3, 0, 2), (3, 2, 1, 0)])),
        str(tile),
    )


@settings(
    max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(_cases())
def any_case_is_right(case: Case) -> None:
    """Check drawn cases, on the CPU."""
    assert case.error() <= 1, case


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, BF16], ids=["", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_the_kernel_computes_what_pytorch_does(name: str, dtype: torch.dtype | None) -> None:
    case = CASES[name]
    dtypes = case.dtypes if dtype is None else (case.dtypes[0], dtype, case.dtypes[2])
    assert dataclasses.replace(case, dtypes=dtypes).error("cuda") <= 1


def test_the_operator_is_registered_once() -> None:
    assert image_conv() is image_conv()
    assert image_conv() is torch.ops.ampopt.image_conv.default


@pytest.mark.parametrize(
    ("rows", "shape", "depth", "sizes"),
    [
        (100_000, (64, 3, 3, 3), 32, {(128, 64), (64, 32)}),
        (3136, (40, 4, 4, 4), 64, {(128, 64), (64, 32)}),
        (100_000, (32, 3, 3, 3), 32, {(128, 32), (64, 32)}),
        (9, (4, 1, 1, 1), 16, {(64, 32)}),
    ],
)
def test_tiles_are_about_as_large_as_what_they_divide(
    rows: int, shape: tuple[int, ...], depth: int, sizes: set[tuple[int, int]]
) -> None:
    tiles = tiles_for(rows, torch.empty(shape, dtype=FP16), tf32=True)
    assert {(tile.depth, tile.stages, tile.precision) for tile in tiles} == {(depth, 1, "ieee")}
    assert {(tile.rows, tile.cols) for tile in tiles} == sizes
    assert len(tiles) == len(sizes)


def test_float32_is_rounded_to_tf32_only_where_that_is_allowed() -> None:
    weight = torch.empty(64, 3, 3, 3)
    assert {tile.precision for tile in tiles_for(1000, weight, tf32=False)} == {"ieee"}
    assert {tile.precision for tile in tiles_for(1000, weight, tf32=True)} == {"tf32"}


def test_a_packed_weight_is_the_same_weight() -> None:
    weight = torch.randn(5, 3, 2, 4)
    assert torch.equal(packed(weight), weight)
    assert packed(weight).permute(1, 2, 3, 0).is_contiguous()
    assert packed(once := packed(weight)) is once
