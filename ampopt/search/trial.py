"""A trial: the result of applying, verifying and timing one pass."""

from __future__ import annotations

import dataclasses
import math
import time

from ampopt.ir.program import Program
from ampopt.measure.entry import Entry, Verdict


@dataclasses.dataclass
class Trial:
    """The result of trying a pass.

    `entry` is its row in the ledger: verdict, reason, error and timings. `program` is the changed program if
    it is correct, kept or not, so that other passes can build on it; else None. `began` and `deadline` are
    seconds on `time.perf_counter`'s clock. A trial `is_over` when its row is written. `hurried`: an engine
    was applied in its form for little time.
    """

    entry: Entry
    deadline: float
    began: float = dataclasses.field(default_factory=time.perf_counter)
    program: Program | None = None
    is_over: bool = False
    hurried: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether the trial failed or gave wrong results."""
        return self.program is None and self.entry.verdict in (Verdict.FAILED, Verdict.REVERTED)

    def is_too_inexact(self, bound: float) -> bool:
        """Whether the results are wrong by a finite error over the limit or a bound."""
        error, limit = self.entry.error, self.entry.limit
        if not self.is_wrong or error is None or limit is None:
            return False
        return min(limit, bound) < error < math.inf

    @property
    def is_doubtful(self) -> bool:
        """Whether other load has left open how fast the changed program is."""
        return self.entry.gain is not None and self.entry.gain.is_vague

    @property
    def seconds(self) -> float:
        """Elapsed time of the trial in seconds."""
        return time.perf_counter() - self.began

    def note(self, **changes: object) -> None:
        """Write results into the row."""
        self.entry = dataclasses.replace(self.entry, **changes)  # type: ignore[arg-type]

    def end(self, verdict: Verdict, reason: str) -> Entry:
        """Finish the row and return it."""
        self.note(verdict=verdict, reason=reason, took_s=self.seconds)
        self.is_over = True
        return self.entry
