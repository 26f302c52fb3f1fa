"""`ampopt::fused_conv`: a convolution or linear layer with its epilogue, as one operator in Triton.

It computes `act2(act1(conv(x · s, w) + b) + z)` for feature maps with the channel innermost. A `Tile`, an
argument of the operator chosen by measurement (`conv_tiles`), says how the kernel divides the work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.kernels.pixel_layout import (
    in_order,
    packed_depthwise,
    pixels,
    reads_runs,
    result_size,
    unit_of,
)
from ampopt.system.once import once

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda v: v,
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""The activations that the kernels support; "" is none."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a kernel divides its work.

    `kind` is the kernel: dense, depthwise or vector. A program computes `rows` pixels and `cols` channels,
    `depth` inputs at a time; `parts` programs share the sums of one tile. `precision` is `tl.dot`'s.
    """

    kind: str
    rows: int
    cols: int
    depth: int = 1
    parts: int = 1
    warps: int = 4
    stages: int = 1
    precision: str = "ieee"

    def __str__(self) -> str:
        return ":".join(str(value) for value in dataclasses.astuple(self))

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Tile:
        """Parse the output of `str`."""
        kind, *numbers, precision = text.split(":")
        rows, cols, depth, parts, warps, stages = map(int, numbers)
        return cls(kind, rows, cols, depth, parts, warps, stages, precision)


def is_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def load_ahead(device: torch.device) -> None:
    """Let Triton read all of its own files and ask for its tools, as it does before its first kernel.

    That takes it a second or two, mostly without Python's lock, in each thread that has a first kernel at the
    same time. Nothing is launched or allocated. Where Triton does it in another way now, nothing happens.
    """
    with contextlib.suppress(Exception), torch.cuda.device(device):
        cache = importlib.import_module("triton.runtime.cache")
        compiler = importlib.import_module("triton.compiler.compiler")
        driver = importlib.import_module("triton.runtime.driver").driver
        (getattr(cache, "triton_key", None) or compiler.triton_key)()
        compiler.make_backend(driver.active.get_current_target()).hash()


@once
def fused_conv() -> torch._ops.OpOverload:
    """The operator; registered with PyTorch at the first call.

    `x` is [batch, channels, height, width] or, for a linear layer, [..., channels]; float32, float16 or
    bfloat16, like all the others. `geometry` holds stride, padding and dilation, two numbers each; it is
    empty for a linear layer, whose `w` is [out, in]. `z` has the result's shape, `s` is
    [batch, channels, 1, 1].
    """
    made = torch.library.custom_op(
        "ampopt::fused_conv",
        _compute,
        mutates_args=(),
        schema="(Tensor x, Tensor w, Tensor? b, Tensor? z, Tensor? s, int[] geometry, int groups, "
        "str act1, str act2, str tile) -> Tensor",
    )
    made.register_fake(_empty_result)
    overload: torch._ops.OpOverload = torch.ops.ampopt.fused_conv.default
    return overload


def _empty_result(x: Tensor, w: Tensor, *arguments: Any) -> Tensor:
    geometry: Sequence[int] = arguments[3]
    if not geometry:
        return x.new_empty((*x.shape[:-1], w.shape[0]))
    shape = (x.shape[0], w.shape[0], *result_size(x.shape[2:], w.shape[2:], geometry))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def reference(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    z: Tensor | None,
    s: Tensor | None,
    geometry: Sequence[int],
    groups: int,
    act1: str,
    act2: str,
) -> Tensor:
    """The operator computed by PyTorch's operators, one after another."""
    if s is not None:
        x = x * s
    if geometry:
        y = F.conv2d(x, w, b, geometry[:2], geometry[2:4], geometry[4:], groups)
    else:
        y = F.linear(x, w, b)
    y = ACTIVATIONS[act1](y)
    return y if z is None else ACTIVATIONS[act2](y + z)


def _compute(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    z: Tensor | None,
    s: Tensor | None,
    geometry: Sequence[int],
    groups: int,
    act1: str,
    act2: str,
    tile: str,
) -> Tensor:
    how, is_image = Tile.parse(tile), bool(geometry)
    y = _empty_result(x, w, b, z, s, geometry)
    x, pixel = pixels(x, is_image=is_image)
    w = packed_depthwise(w) if how.kind == "depthwise" else in_order(w, is_image=is_image)
    b = None if b is None else b.contiguous()
    z = None if z is None else in_order(z, is_image=is_image)
    s = None if s is None else s.contiguous()
    epilogue = {"BIAS": b is not None, "ADD": z is not None, "ACT1": act1, "ACT2": act2}
    call = _Call(how, x, pixel, w, (b, z), s, y, geometry, groups, epilogue)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        {"dense": _dense, "depthwise": _depthwise, "vector": _vector}[how.kind](call)
    return y


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a kernel: operands in the order that it reads them in, `pixel` apart, and its result."""

    tile: Tile
    x: Tensor
    pixel: int
    w: Tensor
    added: tuple[Tensor | None, Tensor | None]
    """b and z."""
    s: Tensor | None
    y: Tensor
    geometry: Sequence[int]
    groups: int
    epilogue: dict[str, Any]

    @property
    def rows(self) -> int:
        """Pixels (or rows) of the result."""
        return self.y.numel() // self.w.shape[0]


_NO_EPILOGUE = {"BIAS": False, "ADD": False, "ACT1": "", "ACT2": ""}

_LARGEST_OFFSET = 2**31
"""The kernels count elements in 32 bits."""


def _dense(call: _Call) -> None:
    from ampopt.kernels.triton_kernels import combine, dense

    tile, x, w, y, rows = call.tile, call.x, call.w, call.y, call.rows
    outs, channels = w.shape[0] // call.groups, w.shape[1]
    sizes, geometry, taps = (1, 1, 1, 1), call.geometry or (1, 1, 0, 0, 1, 1), (1, 1)
    if call.geometry:
        sizes, taps = (*x.shape[2:], *y.shape[2:]), (w.shape[2], w.shape[3])
    unit, out_unit = unit_of(channels, call.pixel), unit_of(outs)
    # A replay may meet a larger shape than the one whose sums were worth splitting.
    parts = tile.parts if tile.parts * y.numel() < _LARGEST_OFFSET else 1
    target = y if parts == 1 else x.new_empty((parts, rows, w.shape[0]), dtype=torch.float32)
    dense[-(-rows // tile.rows), -(-outs // tile.cols), call.groups * parts](
        *(x, w, *call.added, call.s, target, rows, *sizes),
        *(call.pixel // unit, channels // unit, outs // out_unit, call.groups, parts, *geometry),
        KH=taps[0],
        KW=taps[1],
        UNIT=unit,
        OUT_UNIT=out_unit,
        WIDE=call.s is None and reads_runs(channels, taps, call.groups, call.pixel, geometry),
        BM=tile.rows,
        BN=tile.cols,
        BK=tile.depth,
        SPLIT=parts > 1,
        PRECISION=tile.precision,
        SCALE=call.s is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **(call.epilogue if parts == 1 else _NO_EPILOGUE),
    )
    if parts > 1:
        height, width, unit = combine_block(w.shape[0])
        combine[-(-rows // height), -(-w.shape[0] // width)](
            *(target, *call.added, y, rows, w.shape[0] // unit, parts),
            UNIT=unit,
            BM=height,
            BN=width,
            **call.epilogue,
        )


def combine_block(channels: int) -> tuple[int, int, int]:
    """The rows and columns that one `combine` program sums, and its `UNIT`."""
    return 8, min(128, 1 << (channels - 1).bit_length()), unit_of(channels)


def _depthwise(call: _Call) -> None:
    from ampopt.kernels.triton_kernels import depthwise

    assert call.s is None
    tile, x, w, channels = call.tile, call.x, call.w, call.w.shape[0]
    assert call.groups == channels == x.shape[1]
    unit = unit_of(channels, call.pixel)
    depthwise[-(-call.rows // tile.rows), -(-channels // tile.cols)](
        *(x, w, *call.added, call.y, call.rows, *x.shape[2:], *call.y.shape[2:]),
        *(call.pixel // unit, channels // unit, *call.geometry),
        KH=w.shape[2],
        KW=w.shape[3],
        UNIT=unit,
        BM=tile.rows,
        BN=tile.cols,
        num_warps=tile.warps,
        **call.epilogue,
    )


def _vector(call: _Call) -> None:
    from ampopt.kernels.triton_kernels import vector

    assert call.s is None or call.rows == call.s.shape[0]
    tile, (outs, channels) = call.tile, call.w.shape[:2]
    unit = unit_of(channels, outs, call.pixel)
    vector[call.rows, -(-outs // tile.cols)](
        *(call.x, call.w, *call.added, call.s, call.y, call.pixel // unit, channels // unit, outs // unit),
        UNIT=unit,
        BN=tile.cols,
        BK=tile.depth,
        SCALE=call.s is not None,
        num_warps=tile.warps,
        **call.epilogue,
    )
