"""What became of one network."""

from __future__ import annotations

import dataclasses
from typing import Any

FAULTS = ("wrong", "raw", "lost", "crash", "hang", "changed")
"""Outcomes that are somebody's mistake: a wrong answer, an exception that is no AmpoptError, an exception
where the original answers, a process that died, one that did not end, a model or a setting not left alone."""

REVERTED = "reverted"
"""A program that is wrong, or a pass that raises, and that `ampopt.optimize` would not serve: its own
verification refuses the program, or the pass manager records the exception. No fault, and worth mending."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`kind` is "ok", "refused" (an AmpoptError), "skipped" (eager itself fails), `REVERTED`, or a fault.

    `stage` is where in ampopt it happened, `details` what helps to find out why.
    """

    kind: str
    reason: str = ""
    stage: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_fault(self) -> bool:
        """Whether something is to be mended."""
        return self.kind in FAULTS

    def same_as(self, other: Outcome) -> bool:
        """Whether both are the same kind of fault at the same place, for a reason of the same words."""
        return (self.kind, self.stage, self._words) == (other.kind, other.stage, other._words)

    @property
    def _words(self) -> str:
        return "".join(c for c in self.reason if c.isalpha() or c == " ")


def short(error: BaseException, width: int = 300) -> str:
    """An exception's type and message, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= width else text[: width - 2] + " …"
