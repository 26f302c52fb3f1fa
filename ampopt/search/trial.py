"""A trial: the result of applying, verifying and timing one pass."""

from __future__ import annotations

import dataclasses
import time

from ampopt.ir.program import Program
from ampopt.measure.entry import Entry, Verdict


@dataclasses.dataclass
class Trial:
    """What trying something gives.

    `entry` is its row in the ledger: verdict, reason, error and timings. `program` is the changed program
    wherever that is right, kept or not, so that others can build on it; None elsewhere. `began` and
    `deadline` are seconds on `time.perf_counter`'s clock. A trial `is_over` once its row is written.
    """

    entry: Entry
    deadline: float
    began: float = dataclasses.field(default_factory=time.perf_counter)
    program: Program | None = None
    is_over: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether what was tried failed or gave wrong results."""
        return self.program is None and self.entry.verdict in (Verdict.FAILED, Verdict.REVERTED)

    @property
    def seconds(self) -> float:
        """What it has taken until now."""
        return time.perf_counter() - self.began

    def note(self, **changes: object) -> None:
        """Write into the row what has become known."""
        self.entry = dataclasses.replace(self.entry, **changes)  # type: ignore[arg-type]

    def end(self, verdict: Verdict, reason: str) -> Entry:
        """The finished row."""
        self.note(verdict=verdict, reason=reason, took_s=self.seconds)
        self.is_over = True
        return self.entry
