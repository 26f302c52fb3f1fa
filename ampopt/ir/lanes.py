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
    """The largest errors of a lane's programs, as relative errors against the original in float64."""

    always: float
    """An error that always passes."""
    multiple: float
    """Largest ratio of a program's error to eager's own error in the lane."""
    largest: float
    """Largest error of a program, even if eager's own error is larger.

    Exceptions: rounding the weights and inputs again changes eager's outputs as much, or the user gives a
    tolerance.
    """
    without_eager: float = 1e-2
    """Largest error of a program of a mixed lane in which eager's own error is over `largest`, or infinite.

    Eager is no yardstick there; the error that `precision="auto"` accepts is the most that is left. As there,
    an original that rounds to TF32 as it is called, and is more inexact, allows `multiple` of its own error.
    """

    def allowed(self, own: float) -> float:
        """The limit that follows from eager's own error; an infinite error (overflow) allows nothing."""
        return max(self.multiple * own if math.isfinite(own) else 0.0, self.always)


@dataclasses.dataclass(frozen=True)
class Lane:
    """A precision in which a program is optimized, with its settings and limits.

    `name` is its name in options, reports and on the command line, `dtype` the dtype of its computations.
    `onnx` is the precision of its ONNX export. `baked_by` names the pass that writes the precision into the
    graph; before this pass its programs run under autocast. None: no pass is needed.
    """

    name: str
    dtype: torch.dtype
    limits: Limits
    onnx: str = "fp32"
    baked_by: str | None = None

    @property
    def autocast(self) -> torch.dtype | None:
        """The autocast dtype for eager, and for programs before any pass."""
        return None if self.baked_by is None else self.dtype

    @property
    def is_mixed(self) -> bool:
        """Whether the lane may round more than float32 does."""
        return self.dtype is not torch.float32

    def scope(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The settings in which eager is the lane's reference: strict FP32, or under autocast."""
        return Settings().scope(device, self.autocast)

    def start(self, program: Program) -> Program:
        """The captured program with the lane's initial settings."""
        return program.replace(lane=self, under_autocast=self.autocast is not None, settings=Settings())


def mixed(name: str, dtype: torch.dtype) -> Lane:
    """A lane of autocast to a lower precision.

    ONNX Runtime supports float16, and bfloat16 only for few operators: bfloat16 is exported as FP32.
    """
    limits = Limits(always=least_error(dtype), multiple=2.0, largest=0.2)
    return Lane(name, dtype, limits, "fp16" if dtype is torch.float16 else "fp32", "bake-autocast")


FP32 = Lane("fp32", torch.float32, Limits(always=least_error(torch.float32), multiple=4.0, largest=0.02))

LANES: dict[str, dict[str, Lane]] = {
    "fp32": {"cuda": FP32, "cpu": FP32},
    "amp": {"cuda": mixed("amp", torch.float16), "cpu": mixed("amp", torch.bfloat16)},
    "bf16": {"cuda": mixed("bf16", torch.bfloat16), "cpu": mixed("bf16", torch.bfloat16)},
}
"""All lanes by device type; of lanes with the same dtype, the first is used."""


def lane_of(dtype: torch.dtype, device: torch.device) -> Lane:
    """The lane of a device with a given dtype; float16 on a CPU is its "amp"."""
    lanes = [by_device[_kind(device)] for by_device in LANES.values()]
    return next((lane for lane in lanes if lane.dtype is dtype), mixed("amp", dtype))


def lanes_for(precision: str, device: torch.device, amp_dtype: torch.dtype | None = None) -> tuple[Lane, ...]:
    """The lanes of a `precision`: "auto", a lane's name, or several names separated by commas.

    `amp_dtype` is the dtype of "amp"; with torch.bfloat16, "amp" is another name of "bf16". Raises InputError
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
