"""Lanes: the same pipeline in FP32 and in mixed precision, each deciding for itself."""

from __future__ import annotations

import dataclasses

import torch

from ampopt.errors import InputError
from ampopt.ir.program import Program, Settings


@dataclasses.dataclass(frozen=True)
class Lane:
    """A precision in which a program is optimized: its name, and the dtype that it computes in."""

    name: str
    dtype: torch.dtype

    @property
    def settings(self) -> Settings:
        """How a program of the lane runs before any pass: strict FP32, or under autocast."""
        return Settings(autocast=None if self.dtype is torch.float32 else self.dtype)

    def start(self, program: Program) -> Program:
        """A captured program as the lane starts with it."""
        return program.replace(settings=self.settings, lane_dtype=self.dtype)


LANES: dict[str, dict[str, torch.dtype]] = {
    "fp32": {"cuda": torch.float32, "cpu": torch.float32},
    "amp": {"cuda": torch.float16, "cpu": torch.bfloat16},
    "bf16": {"cuda": torch.bfloat16, "cpu": torch.bfloat16},
}
"""What each lane computes in, by the kind of device; where two have one dtype they are the first of them."""

AUTO = ("fp32", "amp")
"""The lanes of `precision="auto"`."""


def lanes_for(precision: str, device: torch.device, amp_dtype: torch.dtype | None = None) -> tuple[Lane, ...]:
    """The lanes that a `precision` asks for: "auto", a lane's name, or several of them with commas between.

    `amp_dtype` is what "amp" computes in; torch.bfloat16 makes it another name of "bf16". Raises InputError
    for other names and dtypes.
    """
    if amp_dtype not in (None, torch.float16, torch.bfloat16):
        raise InputError(f"amp_dtype={amp_dtype!r}: choose torch.float16 or torch.bfloat16")
    said = AUTO if precision == "auto" else names_of(precision)
    kind = "cuda" if device.type == "cuda" else "cpu"
    dtypes = {name: by_device[kind] for name, by_device in LANES.items()}
    if amp_dtype is not None and amp_dtype not in dtypes.values():  # float16 on a CPU
        dtypes["amp"] = amp_dtype
    wanted = dict.fromkeys(amp_dtype if name == "amp" and amp_dtype else dtypes[name] for name in said)
    usual = {dtype: name for name, dtype in reversed(dtypes.items())}
    return tuple(Lane(usual[dtype], dtype) for dtype in wanted)


def names_of(precision: object) -> tuple[str, ...]:
    """The names of lanes in a text with commas. Raises InputError for one that there is not."""
    found = [name.strip() for name in precision.split(",")] if isinstance(precision, str) else []
    if not found or not set(found) <= LANES.keys():
        choices = ", ".join(("auto", *LANES))
        raise InputError(f"precision={precision!r}: choose from {choices}, or several, 'fp32,bf16'")
    return tuple(found)
