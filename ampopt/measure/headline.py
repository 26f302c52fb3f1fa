"""The speedup of a program over another one, with an interval that is also valid on a busy machine.

Two programs that are the same must not be found to differ, so the first is sampled twice in every round, in
random order beside the second: what these two samplings differ by is what the machine makes of one and the
same program, and the interval is widened by it. The random order makes every program as likely as another
to be the one that is interrupted, whatever the machine does at that time and for how long.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Mapping

from ampopt.measure.sampling import Gain, Measurement, Sampler, gain, interleave

NARROW = 1.1
"""Sampling ends where the ends of the interval are within this factor: then "at least" is near the truth."""

LEAST, ENOUGH, MOST = 6, 20, 1000
"""Rounds of a comparison: so many at least, though there is no time; to believe a narrow interval; at most.

Of fewer than six pairs not even the smallest and the largest ratio hold the median with 95 % confidence.
"""

TRIMMED = 0.1
"""The share of the samples at either end that a mean leaves out: a stall says nothing of a program."""


@dataclasses.dataclass(frozen=True)
class Load:
    """How busy the machine was: its load average of the last minute and its cores."""

    average: float
    cores: int

    @property
    def is_high(self) -> bool:
        """More was to be run than there are cores."""
        return self.average > self.cores

    def __str__(self) -> str:
        return f"load average {self.average:.1f} on {self.cores} cores"


def load_now() -> Load | None:
    """The machine's load; None where the system does not tell."""
    try:
        return Load(round(os.getloadavg()[0], 2), os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows has none
        return None


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a comparison measured; `gain` is how many times faster `after` is, see `sure_gain`."""

    before: Measurement
    after: Measurement
    gain: Gain
    load: Load | None


def sure_gain(before: Measurement, after: Measurement, control: Gain) -> Gain:
    """How many times faster `after` is than interleaved `before`, with an interval that claims no more.

    `control` is the gain of a program over itself, sampled in the same rounds: both ends of the 95 % interval
    of the paired ratios move apart by as much as that may differ from 1. They also hold the ratio of the
    means without the largest and smallest tenth, which, unlike a median, does not jump from the time of an
    undisturbed call to that of an interrupted one.
    """
    found = gain(before, after)
    noise = max(control.high, 1 / control.low)
    means = before.trimmed_mean(TRIMMED) / after.trimmed_mean(TRIMMED)
    return Gain(found.ratio, min(found.low / noise, means), max(found.high * noise, means))


def compare_fairly(before: Sampler, after: Sampler, *, seconds: float) -> Compared:
    """Sample both in turn until the interval is narrow or `seconds` have passed; at least `LEAST` rounds."""

    def found(timed: Mapping[str, Measurement]) -> Gain:
        control = gain(timed["before"], timed["before again"])
        return sure_gain(timed["before"], timed["after"], control)

    def is_told(timed: Mapping[str, Measurement]) -> bool:
        told, rounds = found(timed), len(timed["before"].samples)
        return rounds >= ENOUGH and told.high <= NARROW * told.low

    samplers = {"before": before, "after": after, "before again": before}
    order = random.Random(0)
    timed = interleave(samplers, seconds=seconds, least=LEAST, most=MOST, order=order, until=is_told)
    return Compared(timed["before"], timed["after"], found(timed), load_now())
