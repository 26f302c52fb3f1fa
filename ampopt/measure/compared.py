"""What `ampopt.compare` found: a row for each pass, lane and mode, as JSON data and as tables."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group

from ampopt.document.html import to_fragment
from ampopt.document.markdown import to_markdown
from ampopt.document.model import Document
from ampopt.document.text import to_rich
from ampopt.measure.architecture import Architecture
from ampopt.measure.changes import INTERRUPTED_THEN, MISS, SURE_MS, Changes, is_wrong
from ampopt.measure.compared_document import MODES, to_document
from ampopt.measure.report import interval
from ampopt.measure.sampling import Gain, Measurement

__all__ = ["MODES", "NOTHING", "ComparedPass", "Comparison"]

NOTHING = "nothing to do"
"""The beginning of the reason in rows of passes that change nothing; in tables it is all of it."""


@dataclasses.dataclass(frozen=True)
class ComparedPass:
    """One pass in one lane and one mode: median latency and gain over the mode's baseline, or a reason.

    The gain's interval is that of `headline.sure_gain`.

    The baseline is the captured program for "alone", the program one pass earlier for "cumulative", and for
    "left out" the program *without* the pass, so that a gain above 1 always means that the pass helps.
    """

    lane: str
    mode: str
    name: str
    latency: Measurement | None
    gain: Gain | None
    error: float | None
    reason: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether it was timed, and its program gives wrong results."""
        return self.latency is not None and is_wrong(self.reason)

    def told(self) -> str:
        """The row as a cell of a table."""
        if self.latency is None or self.gain is None:
            return NOTHING if self.reason.startswith(NOTHING) else self.reason
        reason = f" {self.reason}" if self.reason else ""
        return f"{1e3 * self.latency.median:.3f} ({_factor(self.gain)}){reason}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`. `print` it for a table."""

    model: str
    environment: dict[str, str]
    inputs: tuple[str, ...]
    rows: tuple[ComparedPass, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    architecture: Architecture | None = None
    interrupted: bool = False
    """Whether Ctrl-C has ended it before its time: rows are missing, or their times are less sure."""

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON data, times in milliseconds."""
        return {
            "model": self.model,
            "architecture": None if self.architecture is None else self.architecture.to_dict(),
            "environment": self.environment,
            "inputs": list(self.inputs),
            "notes": list(self.notes),
            INTERRUPTED_THEN: self.interrupted,
            "seconds": round(self.seconds, 2),
            "rows": [
                {
                    **dataclasses.asdict(row),
                    "latency": None if row.latency is None else _times(row.latency),
                }
                for row in self.rows
            ],
        }

    def document(self, changed: Changes | None = None) -> Document:
        """What every format of a report is rendered from; what `changed` since an earlier run comes first."""
        return to_document(self, changed)

    def to_markdown(self) -> str:
        """A Markdown table for each lane: a row for each pass, a column for each mode."""
        return to_markdown(self.document())

    def to_rich(self) -> Group:
        """The same tables for a terminal, whose width they keep to."""
        return to_rich(self.document())

    def _repr_html_(self) -> str | None:
        """The comparison in a notebook."""
        return to_fragment(self.document())

    def __str__(self) -> str:
        return self.to_markdown()


def _times(measured: Measurement) -> dict[str, Any]:
    """Times for JSON, in milliseconds, with what a later run is compared by."""
    ends = measured.interval_of_median(MISS)
    return {**measured.to_dict(), SURE_MS: [round(1e3 * end, 6) for end in ends]}


def _factor(gain: Gain) -> str:
    """What may be said of a gain in a cell of the table."""
    if gain.is_vague:
        return f"{'faster, ' if gain.is_surely_faster else ''}too busy to tell: {interval(gain)}"
    if gain.at_least > 1 or gain.is_loss:
        return f"{gain.ratio:.2f}x, {interval(gain)}"
    return f"no difference: {interval(gain)}"
