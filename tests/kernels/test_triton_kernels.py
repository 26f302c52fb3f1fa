"""The kernels against PyTorch's operators in float64, on a GPU; `test_interpreted` has them on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ampopt.ir.numerics import relative_error
from ampopt.kernels.conv_tiles import Operands
from ampopt.kernels.fused_conv import ACTIVATIONS, Tile, fused_conv, reference

CHANNELS_LAST = torch.channels_last
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: input [batch, channels, height, width], weight [outs, channels / groups, *taps]."""

    tile: str = "dense:16:16:16:1:4:2:ieee"
    input: tuple[int, int, int, int] = (1, 16, 5, 6)
    outs: int = 16
    taps: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    act1: str = ""
    act2: str = ""
    bias: bool = True
    add: bool = False
    scale: bool = False
    dtype: torch.dtype = torch.float32
    before: int = 0
    """Channels of the tensor that the input is a slice of, before it."""
    after: int = 0
    layout: torch.memory_format = CHANNELS_LAST
    nan: bool = False
    linear: bool = False
    odd_strides: bool = False
    """Bias, factors and addend do not lie in memory as the kernels want them."""

    def operands(self) -> Operands:
        """x, w, b, z, s."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        batch, channels, *size = self.input
        x = random(batch, self.before + channels + self.after, *size).contiguous(memory_format=self.layout)
        x = x[:, self.before : self.before + channels]
        if self.nan:
            x[0, 0, 0, 0] = torch.nan
        width = channels // self.groups
        w = random(self.outs, width, *self.taps) / (width * self.taps[0] * self.taps[1]) ** 0.5
        w = w.contiguous(memory_format=CHANNELS_LAST)
        b = random(self.outs) if self.bias else None
        s = random(batch, channels, 1, 1) if self.scale else None
        if self.linear:
            x, w = x.permute(0, 2, 3, 1), w.flatten(1)
        z = random(*reference(x, w, None, None, None, self.geometry, self.groups, "", "").shape)
        if self.odd_strides:
            b = None if b is None else random(1).expand(self.outs)
            s = None if s is None else random(batch, 1, 1, 1).expand(s.shape)
            w = w.t().contiguous().t() if self.linear else w.contiguous()
        elif not self.linear:
            z = z.contiguous(memory_format=CHANNELS_LAST)
        return x, w, b, z if self.add else None, s

    @property
    def geometry(self) -> list[int]:
        return [] if self.linear else [*self.stride, *self.padding, *self.dilation]

    def error(self) -> float:
        """The relative error of the kernel; infinite where the result is another kind of tensor."""
        operands = self.operands()
        call = (self.geometry, self.groups, self.act1, self.act2)
        y = fused_conv()(*operands, *call, self.tile)
        expected = reference(*_each(operands, lambda t: t.double()), *call)
        fake = fused_conv()(*_each(operands, lambda t: t.to("meta")), *call, self.tile)
        alike = (fake.shape, fake.dtype, fake.stride()) == (y.shape, y.dtype, y.stride())
        return relative_error(y, expected) / LIMITS[self.dtype] if alike else float("inf")


def _each(operands: Operands, change: Callable[[Tensor], Tensor]) -> Operands:
    x, w, *rest = operands
    b, z, s = (None if t is None else change(t) for t in rest)
    return change(x), change(w), b, z, s


DEPTHWISE, VECTOR = "depthwise:8:16:1:1:4:1:ieee", "vector:1:8:32:1:4:1:ieee"
SPLIT = "dense:16:16:16:3:4:2:ieee"
UNEQUAL = {"taps": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}

CASES: dict[str, Case] = {
    **{f"{kind or 'nothing'} first": Case(act1=kind, nan=kind == "relu") for kind in ACTIVATIONS},
    **{f"{kind or 'nothing'} after an addition": Case(act2=kind, add=True) for kind in ACTIVATIONS},
    "activation, addition, activation": Case(act1="silu", act2="relu6", add=True, bias=False),
    "NaN through relu6": Case(act1="relu6", nan=True),
    "NaN through hardsigmoid and hardswish": Case(act1="hardsigmoid", act2="hardswish", add=True, nan=True),
    "factors, several images": Case(input=(3, 24, 3, 3), outs=20, scale=True, act1="relu"),
    "factors in float16": Case(input=(2, 24, 3, 3), scale=True, dtype=torch.float16),
    "factors and taps": Case(input=(2, 3, 4, 5), taps=(3, 3), padding=(1, 1), scale=True),
    "unequal in height and width": Case(**UNEQUAL),  # type: ignore[arg-type]
    "one tap with a border": Case(padding=(1, 2), act1="relu"),
    "one tap with a border and factors": Case(input=(2, 16, 3, 3), padding=(2, 1), stride=(2, 2), scale=True),
    "two groups": Case(groups=2, input=(1, 32, 3, 4), outs=32, taps=(3, 3), padding=(1, 1)),
    "groups of two channels": Case(groups=3, input=(1, 6, 4, 4), outs=3, taps=(3, 3)),
    "groups in parts": Case(
        SPLIT, groups=2, input=(1, 32, 3, 4), outs=36, taps=(3, 1), act1="relu", add=True
    ),
    "wide stem": Case("dense:16:16:32:1:4:2:ieee", (1, 3, 9, 10), 8, (7, 7), (2, 2), (3, 3), act1="relu"),
    "wide stem in parts": Case("dense:16:16:32:4:4:2:ieee", (1, 3, 9, 7), 8, (5, 3), (2, 1), (2, 0)),
    "a stem that is no run": Case(input=(1, 3, 6, 7), outs=8, taps=(3, 3), dilation=(1, 2)),
    "more parts than sums": Case("dense:16:16:16:5:4:2:ieee", input=(1, 24, 3, 3), outs=20, act1="relu"),
    "parts": Case(SPLIT, input=(2, 20, 3, 5), outs=24, taps=(2, 2), act1="silu", act2="relu", add=True),
    "parts without a bias": Case(SPLIT, bias=False),
    "sizes that no tile divides": Case("dense:32:16:32:1:4:2:ieee", (1, 19, 5, 7), 21, (2, 3)),
    "one channel": Case(input=(2, 1, 3, 3), outs=1, taps=(2, 2)),
    "depthwise": Case(DEPTHWISE, (2, 24, 4, 5), 24, (3, 3), (2, 1), (1, 0), groups=24, act1="hardswish"),
    "depthwise, dilated, added": Case(
        DEPTHWISE, (1, 12, 5, 4), 12, (2, 3), (1, 1), (1, 2), (2, 1), groups=12, act2="relu", add=True
    ),
    "depthwise slice": Case(DEPTHWISE, (1, 8, 4, 4), 8, (3, 3), groups=8, before=3, after=2),
    "depthwise in float16": Case(DEPTHWISE, (1, 8, 4, 4), 8, (3, 3), groups=8, dtype=torch.float16),
    "depthwise, a row of many taps at a time": Case(
        DEPTHWISE, (2, 12, 3, 3), 12, (7, 5), (2, 1), (3, 4), (1, 2), groups=12, act1="silu"
    ),
    "depthwise, a row at a time, in float16": Case(
        DEPTHWISE, (1, 8, 2, 3), 8, (9, 9), padding=(4, 4), groups=8, add=True, dtype=torch.float16
    ),
    "depthwise by the dense kernel": Case(input=(1, 4, 3, 3), outs=4, taps=(2, 2), groups=4),
    "vector": Case(VECTOR, (3, 70, 1, 1), 20, act1="sigmoid"),
    "vector with factors": Case(VECTOR, (3, 40, 1, 1), 20, scale=True, act1="relu", add=True),
    "vector of pixels": Case(VECTOR, (1, 40, 2, 3), 12),
    "vector slice": Case(VECTOR, (2, 40, 1, 1), 12, before=1, after=3),
    "linear": Case(input=(2, 24, 1, 5), outs=20, linear=True, act1="gelu", add=True),
    "linear in parts": Case(SPLIT, (2, 50, 1, 5), 20, linear=True, act1="gelu_tanh"),
    "linear vector": Case(VECTOR, (2, 50, 1, 1), 20, linear=True),
    "linear slice": Case(input=(2, 24, 1, 5), linear=True, before=2, after=1),
    "linear, odd strides": Case(input=(2, 24, 1, 5), outs=20, linear=True, add=True, odd_strides=True),
    "linear vector, odd strides": Case(VECTOR, (2, 24, 1, 1), 20, linear=True, odd_strides=True),
    "odd strides": Case(input=(2, 16, 3, 3), add=True, scale=True, odd_strides=True),
    "depthwise, odd strides": Case(DEPTHWISE, (1, 8, 4, 4), 8, (3, 3), groups=8, add=True, odd_strides=True),
    "aligned slice": Case(before=8, after=8),
    "slice that begins anywhere": Case(before=1, after=2, taps=(3, 3)),
    "slice of a stem": Case(input=(1, 3, 5, 5), outs=8, taps=(3, 3), after=1),
    "channels outermost": Case(layout=torch.contiguous_format, taps=(2, 2)),
    "float16": Case(dtype=torch.float16, taps=(3, 3), act1="silu", add=True),
    "float16 in parts": Case(SPLIT, dtype=torch.float16, taps=(3, 3), act1="relu", add=True),
}


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    pair = st.tuples(st.integers(1, 2), st.integers(1, 2))
    kind = draw(st.sampled_from(["dense", "parts", "depthwise", "vector"]))
    taps = (1, 1) if kind == "vector" else draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = draw(pair)
    least = [dilation[d] * (taps[d] - 1) + 1 for d in (0, 1)]
    size = [draw(st.integers(n, n + 2)) for n in least]
    groups = 1 if kind == "vector" else draw(st.integers(1, 3))
    width, outs = draw(st.integers(1, 18)), draw(st.integers(1, 18))
    if kind == "depthwise":
        groups, width, outs = draw(st.integers(2, 20)), 1, 1
    tile = {
        "dense": Tile("dense", draw(st.sampled_from([16, 32])), 16, draw(st.sampled_from([16, 32]))),
        "parts": Tile("dense", 16, 16, 16, draw(st.integers(2, 4))),
        "depthwise": Tile("depthwise", 4, draw(st.sampled_from([8, 32]))),
        "vector": Tile("vector", 1, draw(st.sampled_from([4, 8])), 16),
    }[kind]
    in_place = kind == "vector"
    return Case(
        str(tile),
        (draw(st.integers(1, 2)), groups * width, *((1, 1) if in_place else size)),
        groups * outs,
        taps,
        (1, 1) if in_place else draw(pair),
        (0, 0) if in_place else draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        dilation,
        groups,
        draw(st.sampled_from(list(ACTIVATIONS))),
        draw(st.sampled_from(list(ACTIVATIONS))),
        bias=draw(st.booleans()),
        add=draw(st.booleans()),
        scale=kind != "depthwise" and draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),  # the interpreter has no bfloat16
        before=draw(st.integers(0, 1)),
        after=draw(st.integers(0, 1)),
    )


@settings(
    max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(_cases())
def any_case_is_right(case: Case) -> None:
    """Check drawn cases, on the CPU."""
    assert case.error() <= 1, case


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_a_kernel_computes_what_pytorch_does(name: str, dtype: torch.dtype | None) -> None:
    values = {field.name: getattr(CASES[name], field.name) for field in dataclasses.fields(Case)}
    assert _OnGpu(**{**values, "dtype": dtype or values["dtype"]}).error() <= 1


class _OnGpu(Case):
    def operands(self) -> Operands:
        return _each(super().operands(), lambda t: _moved(t, "cuda"))


def _moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor with its strides and its place in its storage, on another device."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return torch.as_strided(storage.to(device), tensor.shape, tensor.stride(), tensor.storage_offset())
