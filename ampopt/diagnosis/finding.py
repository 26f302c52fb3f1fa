"""A finding: what costs time or is wrong, where, with its evidence, and what its remedy brought when run."""

from __future__ import annotations

import dataclasses
from typing import Any

from ampopt.measure.report import interval
from ampopt.measure.sampling import Gain, Measurement

ROUNDING = 1.01
"""Three digits of two times, and an interval in hundredths, may differ by this factor and mean the same."""


def milliseconds(seconds: float) -> str:
    """Three digits of a time: `0.263`, `43.9`, `1320`."""
    ms = 1e3 * seconds
    return f"{ms:.3g}" if ms < 999.5 else f"{ms:.0f}"


def counted(count: int, one: str, many: str) -> str:
    """`1 cast takes`, `3 casts take`: a number with the words for it."""
    return f"{count} {one if count == 1 else many}"


@dataclasses.dataclass(frozen=True)
class Counterfactual:
    """A remedy that was executed: `before` and `after` were sampled in turn, in this process.

    `change` completes the sentence "… it takes 0.9 ms". `of`: what was timed, a call unless told otherwise.
    """

    change: str
    before: Measurement
    after: Measurement
    gain: Gain
    of: str = "a call"

    @property
    def helps(self) -> bool:
        """Whether it is certainly faster; not where the machine is too busy to tell."""
        return self.gain.at_least > 1

    @property
    def fits(self) -> bool:
        """Whether the medians have the ratio that the pairs of samples have.

        They have another where calls took longer during a part of the samples, as with other work on the
        machine: a pair's two are neighbours, and the medians may come from before it and after it.
        """
        quotient = self.before.median / self.after.median
        return self.gain.low / ROUNDING <= quotient <= self.gain.high * ROUNDING

    @property
    def times(self) -> str:
        """`2.00x `, how many times faster the second way is; nothing where the medians say another number."""
        return f"{self.gain.ratio:.2f}x " if self.fits else ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON, times in milliseconds."""
        return {
            "change": self.change,
            "of": self.of,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "gain": dataclasses.asdict(self.gain),
        }

    def __str__(self) -> str:
        before, after = milliseconds(self.before.median), milliseconds(self.after.median)
        taken = f"{self.change}, {self.of} takes {after} ms instead of {before}"
        if self.fits:
            return f"{taken} ({self.gain.ratio:.2f}x, {interval(self.gain)})"
        return f"{taken} in the median; pair by pair it is {interval(self.gain)} times as fast"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One answer to "why is it slow?".

    `says` is the evidence in one sentence, `places` where in the model it is (`layer1.0.conv1,
    resnet.py:92`), `advice` what to do. `share` is the part of a call's time in `lane` that it costs, from 0
    to 1, by which findings are ranked; `is_fault` ones (the results are other ones than meant) come first.
    `counterfactual` None: the remedy cannot be executed without changing the model's code.
    """

    name: str
    says: str
    places: tuple[str, ...] = ()
    advice: str = ""
    lane: str = "fp32"
    share: float = 0.0
    is_fault: bool = False
    counterfactual: Counterfactual | None = None

    def mark(self, whole: str = "") -> str:
        """`amp, 31%`: the lane, and what share it costs (of `whole`), if any, or that it is a fault."""
        cost = "fault" if self.is_fault else f"{self.share:.0%}{whole}"
        return self.lane if cost.startswith("0%") else f"{self.lane}, {cost}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ran = None if self.counterfactual is None else self.counterfactual.to_dict()
        return {**dataclasses.asdict(self), "share": round(self.share, 4), "counterfactual": ran}


def ranked(findings: list[Finding]) -> tuple[Finding, ...]:
    """Faults first, then by what they cost."""
    return tuple(sorted(findings, key=lambda finding: (not finding.is_fault, -finding.share)))


def saved(counterfactual: Counterfactual) -> float:
    """The share of its time that a remedy saves; 0 where it is not certainly faster."""
    return 1 - 1 / counterfactual.gain.ratio if counterfactual.helps else 0.0
