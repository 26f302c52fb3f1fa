"""The ledger: for every pass and lane what was before, what after, and why it was kept or not."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from ampopt.ir.transform import Declined
from ampopt.measure.headline import Load
from ampopt.measure.sampling import Gain, Measurement

ORIGINAL = "original"
"""What a ledger's `chosen` says where the original model runs because nothing is faster or verified."""


class Verdict(enum.Enum):
    """What became of a pass in a lane."""

    KEPT = "kept"
    REVERTED = "reverted"
    DECLINED = "declined"
    FAILED = "failed"
    NOT_TRIED = "not tried"


def _finite(number: float | None) -> float | None:
    """JSON has no infinity: such an error is null there, and the reason beside it says so."""
    return number if number is not None and math.isfinite(number) else None


@dataclasses.dataclass(frozen=True)
class Timing:
    """One program on both clocks; `device` is None where the program cannot run in a CUDA graph."""

    latency: Measurement
    device: Measurement | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, times in milliseconds."""
        device = None if self.device is None else self.device.to_dict()
        return {"latency": self.latency.to_dict(), "device": device}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one pass did in one lane.

    `error` is the relative error against the original in float64 (or the user's metric), `limit` what was
    allowed; `gain` is on the clock that the pass is judged by; `memory` in bytes; `seconds` is what applying
    the pass took (compile time, searches), `took_s` the whole trial, verifying and timing included.
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

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
            "error": _finite(self.error),
            "limit": _finite(self.limit),
            "memory_bytes": self.memory,
            "apply_s": round(self.seconds, 3),
            "took_s": round(self.took_s, 3),
        }


@dataclasses.dataclass(frozen=True)
class LaneSummary:
    """The outcome of one lane: latency and error of eager and of the best program, and if it may be used.

    `gain` is the best program's over eager in the same lane, see `headline.sure_gain`.
    """

    lane: str
    dtype: str
    eager: Measurement
    eager_error: float
    best: Measurement
    error: float
    passes: tuple[str, ...]
    device: Measurement | None = None
    memory: int | None = None
    refused: str | None = None
    gain: Gain | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, times in milliseconds."""
        return {
            "lane": self.lane,
            "dtype": self.dtype,
            "eager": self.eager.to_dict(),
            "eager_error": _finite(self.eager_error),
            "best": self.best.to_dict(),
            "gain": None if self.gain is None else dataclasses.asdict(self.gain),
            "device": None if self.device is None else self.device.to_dict(),
            "error": _finite(self.error),
            "passes": list(self.passes),
            "memory_bytes": self.memory,
            "refused": self.refused,
        }


@dataclasses.dataclass
class Ledger:
    """Everything that `optimize` found out about a model. `print` it for a table.

    `baseline` is the original as the user would call it, with the global flags as they are; `lanes` has a
    summary for each lane that was finished; `chosen` names the one that the result runs, or
    is `ORIGINAL`. `gain` is what `chosen` gains over `baseline`, both sampled in turn in a comparison of
    their own, and `load` the machine's load then; `control` is what the original gained over itself, when
    the lanes were compared.
    """

    model: str
    environment: dict[str, str]
    inputs: tuple[str, ...]
    baseline: Measurement | None = None
    gain: Gain | None = None
    load: Load | None = None
    control: Gain | None = None
    entries: list[Entry] = dataclasses.field(default_factory=list)
    lanes: dict[str, LaneSummary] = dataclasses.field(default_factory=dict)
    chosen: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    regions: dict[str, Ledger] = dataclasses.field(default_factory=dict)

    @property
    def speedup(self) -> float | None:
        """How many times faster the result is at least than the original as the user calls it.

        The lower end of `gain`'s interval; 1 where the original was chosen, where there is no difference,
        and where the machine was too busy to tell.
        """
        if self.chosen == ORIGINAL:
            return 1.0
        return None if self.chosen is None or self.gain is None else self.gain.at_least

    @property
    def verified(self) -> bool:
        """Whether some lane has a verified program, be it faster than the original or not."""
        return any(lane.refused is None for lane in self.lanes.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON, times in milliseconds."""
        return {
            "model": self.model,
            "environment": self.environment,
            "inputs": list(self.inputs),
            "baseline": None if self.baseline is None else self.baseline.to_dict(),
            "chosen": self.chosen,
            "speedup": self.speedup,
            "gain": None if self.gain is None else dataclasses.asdict(self.gain),
            "load": None if self.load is None else dataclasses.asdict(self.load),
            "control": None if self.control is None else dataclasses.asdict(self.control),
            "lanes": {name: lane.to_dict() for name, lane in self.lanes.items()},
            "passes": [entry.to_dict() for entry in self.entries],
            "notes": self.notes,
            "seconds": round(self.seconds, 2),
            "regions": {name: region.to_dict() for name, region in self.regions.items()},
        }

    def __str__(self) -> str:
        from ampopt.measure.report import to_text

        return to_text(self)
