"""A row of the ledger: times, error and verdict of one pass in one lane, with the reason."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from ampopt.ir.transform import Declined
from ampopt.measure.sampling import Gain, Measurement

ORIGINAL = "original"
"""The value of a ledger's `chosen` if the original model runs, because nothing is faster or verified."""


class Verdict(enum.Enum):
    """The verdict on a pass in a lane."""

    KEPT = "kept"
    REVERTED = "reverted"
    DECLINED = "declined"
    FAILED = "failed"
    NOT_TRIED = "not tried"


def finite(number: float | None) -> float | None:
    """JSON has no infinity: such an error becomes null, and the row's reason explains it."""
    return number if number is not None and math.isfinite(number) else None


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one program on both clocks; `device` is None if it cannot be captured as a CUDA graph."""

    latency: Measurement
    device: Measurement | None = None

    def to_dict(self) -> dict[str, Any]:
        """The times for JSON, in milliseconds."""
        device = None if self.device is None else self.device.to_dict()
        return {"latency": self.latency.to_dict(), "device": device}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Measurements and verdict of one pass in one lane.

    `error` is the relative error against the original in float64 (or the user's metric), `limit` what was
    allowed; `gain` is on the clock that judges the pass; `memory` is in bytes; `seconds` is the time of
    applying the pass (compilation, searches), `took_s` that of the whole trial, including verification and
    timing. `needs_s` is the time in seconds that a trial would need for which there was none; None for
    others.
    """

    lane: str
    name: str
    verdict: Verdict
    reason: str
    rewrites: int = 0
    declined: tuple[Declined, ...] = ()
    hints: tuple[str, ...] = ()
    before: Timing | None = None
    after: Timing | None = None
    gain: Gain | None = None
    error: float | None = None
    limit: float | None = None
    memory: int | None = None
    seconds: float = 0.0
    took_s: float = 0.0
    needs_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON data."""
        return {
            "lane": self.lane,
            "pass": self.name,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "rewrites": self.rewrites,
            "declined": [dataclasses.asdict(item) for item in self.declined],
            "hints": list(self.hints),
            "before": None if self.before is None else self.before.to_dict(),
            "after": None if self.after is None else self.after.to_dict(),
            "gain": None if self.gain is None else dataclasses.asdict(self.gain),
            "error": finite(self.error),
            "limit": finite(self.limit),
            "memory_bytes": self.memory,
            "apply_s": round(self.seconds, 3),
            "took_s": round(self.took_s, 3),
            "needs_s": None if self.needs_s is None else round(self.needs_s, 1),
        }
