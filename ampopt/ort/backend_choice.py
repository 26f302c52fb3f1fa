"""Selects the backend for a robot by median latency, tail latency and number of threads.

The median alone would prefer a backend that is usually slightly faster but sometimes much slower, which
misses deadlines. A backend that uses every core for a small gain takes the cores from the robot's other
processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ampopt.measure.sampling import Measurement

EQUAL = 1.1
"""Backends whose cost is within this factor of the lowest are equal; then the fewest threads decide."""

TAILS = {0.99: 100, 0.9: 10}
"""Tail quantiles, each with the number of samples from which on it is known."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """The measured latency of one backend, and the number of CPU threads that it uses."""

    latency: Measurement
    threads: int

    @property
    def tail(self) -> float:
        """The largest quantile of `TAILS` with enough samples, else the median; in seconds."""
        known = (q for q, least in TAILS.items() if len(self.latency.samples) >= least)
        found = self.latency.quantile(next(known, 0.5))
        return self.latency.median if found is None else found

    @property
    def cost(self) -> float:
        """The geometric mean of median and tail in seconds: relative changes of both have equal weight."""
        return math.sqrt(self.latency.median * self.tail)

    def __str__(self) -> str:
        p50, tail = 1e3 * self.latency.median, 1e3 * self.tail
        return f"median {p50:.3f} ms, tail {tail:.3f} ms, {self.threads} thread{'s' * (self.threads != 1)}"


def best(timed: Mapping[str, Timed]) -> str:
    """The backend with the lowest cost; among equal ones, the one with the fewest threads."""
    least = min(way.cost for way in timed.values())
    good = [name for name, way in timed.items() if way.cost <= EQUAL * least]
    return min(good, key=lambda name: (timed[name].threads, timed[name].cost))
