"""Selects the backend for a robot by median latency, tail latency and number of threads.

The median alone prefers what is a little faster mostly and much slower now and then, which misses deadlines;
and what takes every core for a little gain takes them from the robot's other processes, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ampopt.measure.sampling import Measurement

EQUAL = 1.1
"""What costs less than this much more than the cheapest is as good, and the fewest threads decide."""

TAILS = {0.99: 100, 0.9: 10}
"""The tail that is looked at, and the samples from which on a sample beyond it is known."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """The measured latency of one way to run a model, and how many of the processor's threads it takes."""

    latency: Measurement
    threads: int

    @property
    def tail(self) -> float:
        """The largest quantile of `TAILS` that the samples tell, else the median; in seconds."""
        known = (q for q, least in TAILS.items() if len(self.latency.samples) >= least)
        found = self.latency.quantile(next(known, 0.5))
        return self.latency.median if found is None else found

    @property
    def cost(self) -> float:
        """The geometric mean of median and tail in seconds: a share of one weighs as much as of the other."""
        return math.sqrt(self.latency.median * self.tail)

    def __str__(self) -> str:
        p50, tail = 1e3 * self.latency.median, 1e3 * self.tail
        return f"median {p50:.3f} ms, tail {tail:.3f} ms, {self.threads} thread{'s' * (self.threads != 1)}"


def best(timed: Mapping[str, Timed]) -> str:
    """The way of the least cost; among those as good as it, the one that takes the fewest threads."""
    least = min(way.cost for way in timed.values())
    good = [name for name, way in timed.items() if way.cost <= EQUAL * least]
    return min(good, key=lambda name: (timed[name].threads, timed[name].cost))
