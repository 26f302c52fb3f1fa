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


def lanes_for(precision: str, device: torch.device, amp_dtype: torch.dtype | None = None) -> tuple[Lane, ...]:
    """The lanes that a `precision` of "auto", "fp32" or "amp" asks for.

    Mixed precision is float16 on CUDA and bfloat16 on a CPU unless `amp_dtype` says otherwise.
    """
    low = amp_dtype
    if low is None:
        low = torch.float16 if device.type == "cuda" else torch.bfloat16
    if low not in (torch.float16, torch.bfloat16):
        raise InputError(f"amp_dtype={low!r}: choose torch.float16 or torch.bfloat16")
    fp32, amp = Lane("fp32", torch.float32), Lane("amp", low)
    choices = {"auto": (fp32, amp), "fp32": (fp32,), "amp": (amp,)}
    if not isinstance(precision, str) or precision not in choices:
        raise InputError(f"precision={precision!r}: choose from {', '.join(choices)}")
    return choices[precision]
