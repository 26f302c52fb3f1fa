"""Lanes: the precisions (FP32, mixed) in which the same pipeline is tried independently."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from ampopt.errors import InputError
from ampopt.ir.numerics import least_error
from ampopt.ir.precisions import names_of
from ampopt.ir.settings import Settings

if TYPE_CHECKING:
    from ampopt.ir.program import Program


@dataclasses.dataclass(frozen=True)
class Limits:
    """How inexact a program of a lane may be, as relative errors against the original in float64."""

    always: float
    """An error that always passes."""
    multiple: float
    """How many times eager's own error in the lane a program may have."""
    largest: float
    """However wrong eager is itself, no program may have a larger error, unless rounding the weights and
    inputs anew moves eager as far, or the user gives a tolerance."""

    def allowed(self, own: float) -> float:
        """What eager's own error permits; an infinite one, from an overflow, permits nothing."""
        return max(self.multiple * own if math.isfinite(own) else 0.0, self.always)


@dataclasses.dataclass(frozen=True)
class Lane:
    """A precision in which a program is optimized, and all that it means.

    `name` is what options, reports and the command line say, `dtype` what it computes in. `onnx` is the
    precision of its ONNX export. `baked_by` names the pass that writes the precision into the graph; until
    then its programs run under autocast. None: nothing is to be written.
    """

    name: str
    dtype: torch.dtype
    limits: Limits
    onnx: str = "fp32"
    baked_by: str | None = None

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the autocast under which eager, and a program before any pass, compute in it."""
        return None if self.baked_by is None else self.dtype

    @property
    def is_mixed(self) -> bool:
        """Whether it may round more than float32 does."""
        return self.dtype is not torch.float32

    def scope(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The world in which eager is the lane's reference: strict FP32, or under autocast."""
        return Settings().scope(device, self.autocast)

    def start(self, program: Program) -> Program:
        """A captured program as the lane starts with it."""
        return program.replace(lane=self, under_autocast=self.autocast is not None, settings=Settings())


def mixed(name: str, dtype: torch.dtype) -> Lane:
    """A lane of autocast to a lower precision.

    ONNX Runtime computes in float16, and in bfloat16 hardly anywhere: that is exported as FP32.
    """
    limits = Limits(always=least_error(dtype), multiple=2.0, largest=0.2)
    return Lane(name, dtype, limits, "fp16" if dtype is torch.float16 else "fp32", "bake-autocast")


FP32 = Lane("fp32", torch.float32, Limits(always=least_error(torch.float32), multiple=4.0, largest=0.02))

LANES: dict[str, dict[str, Lane]] = {
    "fp32": {"cuda": FP32, "cpu": FP32},
    "amp": {"cuda": mixed("amp", torch.float16), "cpu": mixed("amp", torch.bfloat16)},
    "bf16": {"cuda": mixed("bf16", torch.bfloat16), "cpu": mixed("bf16", torch.bfloat16)},
}
"""Every lane by the kind of device; where two compute in one dtype they are the first of them."""


def lane_of(dtype: torch.dtype, device: torch.device) -> Lane:
    """The lane of a device that computes in a dtype; float16 on a CPU is its "amp"."""
    lanes = [by_device[_kind(device)] for by_device in LANES.values()]
    return next((lane for lane in lanes if lane.dtype is dtype), mixed("amp", dtype))


def lanes_for(precision: str, device: torch.device, amp_dtype: torch.dtype | None = None) -> tuple[Lane, ...]:
    """The lanes that a `precision` asks for: "auto", a lane's name, or several of them with commas between.

    `amp_dtype` is what "amp" computes in; torch.bfloat16 makes it another name of "bf16". Raises InputError
    for other names and dtypes.
    """
    if amp_dtype not in (None, torch.float16, torch.bfloat16):
        raise InputError(f"amp_dtype={amp_dtype!r}: choose torch.float16 or torch.bfloat16")
    lanes = {name: by_device[_kind(device)] for name, by_device in LANES.items()}
    if amp_dtype is not None:
        same = (lane for lane in lanes.values() if lane.dtype is amp_dtype)
        lanes["amp"] = next(same, mixed("amp", amp_dtype))
    usual = {lane.dtype: lane for lane in reversed(lanes.values())}
    wanted = dict.fromkeys(lanes[name].dtype for name in names_of(precision))
    return tuple(usual[dtype] for dtype in wanted)


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "cpu"
