"""The speedup of a program over another one, with an interval that is also valid on a busy machine.

Two equal programs must not be reported as different, so the first program is sampled twice in every round, in
random order with the second: the difference of these two samples is the machine's noise, and the interval is
widened by it. In random order every program is equally likely to be interrupted by other load.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

from ampopt.measure.sampling import Gain, Measurement, Sampler, gain, interleave, tells_soon
from ampopt.system.budget import COSTLY_CALL_S

Until = Callable[[Mapping[str, Measurement]], bool]
"""Whether what was sampled until now is enough."""

NARROW = 1.1
"""Sampling ends when the ends of the interval are within this factor."""

LEAST, ENOUGH, MOST = 6, 20, 1000
"""Rounds of a reported comparison: minimum, even without time; number to trust a narrow interval; maximum.

With fewer than six pairs, even the smallest and largest ratio do not contain the median with 95 % confidence.
"""

TELLING = 1 / 3
"""Share of the time after which the width of an interval tells how many more rounds would make it narrow."""

TRIMMED = 0.1
"""Share of samples left out at each end by a trimmed mean, because stalls are not the program's time."""


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of the machine: load average of the last minute, and number of cores."""

    average: float
    cores: int

    @property
    def is_high(self) -> bool:
        """Whether the load average exceeds the number of cores."""
        return self.average > self.cores

    def __str__(self) -> str:
        return f"load average {self.average:.1f} on {self.cores} cores"


def load_now() -> Load | None:
    """The machine's load; None if the system does not provide it."""
    try:
        return Load(round(os.getloadavg()[0], 2), os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows has none
        return None


def is_busy() -> bool:
    """Whether more runs on the machine than it has cores; False if the system does not tell."""
    load = load_now()
    return load is not None and load.is_high


@dataclasses.dataclass(frozen=True)
class Compared:
    """The measurements of a comparison; `gain` is how many times faster `after` is, see `sure_gain`."""

    before: Measurement
    after: Measurement
    gain: Gain
    load: Load | None


def sure_gain(before: Measurement, after: Measurement, control: Gain) -> Gain:
    """How many times faster `after` is than interleaved `before`, with a conservative interval.

    `control` is the gain of a program over itself, sampled in the same rounds: both ends of the 95 % interval
    of the paired ratios move apart by as much as that may differ from 1. The interval also contains the ratio
    of the trimmed means (without the largest and smallest tenth), which, unlike medians, do not jump between
    the times of undisturbed and interrupted calls.
    """
    found = gain(before, after)
    noise = max(control.high, 1 / control.low)
    means = before.trimmed_mean(TRIMMED) / after.trimmed_mean(TRIMMED)
    return Gain(found.ratio, min(found.low / noise, means), max(found.high * noise, means))


def told_within(seconds: float) -> Callable[[int, Sequence[Gain]], bool]:
    """Whether so many rounds are enough to tell gains, asked while sampling, which may take so long from now.

    They are where every interval is narrow, and where the widest one is not going to be: its width in
    logarithms shrinks with the square root of the number of rounds.
    """
    began = time.perf_counter()

    def is_told(rounds: int, gains: Sequence[Gain]) -> bool:
        widest = max((found.high / found.low for found in gains), default=1.0)
        if rounds >= ENOUGH and widest <= NARROW:
            return True
        spent, needed = time.perf_counter() - began, (math.log(widest) / math.log(NARROW)) ** 2
        return rounds >= ENOUGH and spent >= TELLING * seconds and needed * spent > seconds

    return is_told


def compare_fairly(before: Sampler, after: Sampler, *, seconds: float) -> Compared:
    """Sample both for `seconds`, or until more would not help, see `told_within`; at least `LEAST` rounds."""
    return _compared(before, after, seconds, None)


def compare_to_decide(before: Sampler, after: Sampler, *, seconds: float) -> Compared:
    """As `compare_fairly` where only `is_real` counts: fewer rounds where calls are costly.

    They end early where it is plain, see `tells_soon`, and where `after` was no faster in any of them.
    """

    def is_plain(timed: Mapping[str, Measurement]) -> bool:
        pair = timed["before"], timed["after"]
        is_costly = min(each.median for each in pair) >= COSTLY_CALL_S
        return tells_soon(*pair) or (is_costly and gain(*pair).high < 1)

    return _compared(before, after, seconds, is_plain)


def _compared(before: Sampler, after: Sampler, seconds: float, is_plain: Until | None) -> Compared:
    enough = told_within(seconds)

    def found(timed: Mapping[str, Measurement]) -> Gain:
        control = gain(timed["before"], timed["before again"])
        return sure_gain(timed["before"], timed["after"], control)

    def is_told(timed: Mapping[str, Measurement]) -> bool:
        if is_plain is not None and is_plain(timed):
            return True
        return enough(len(timed["before"].samples), [found(timed)])

    samplers = {"before": before, "after": after, "before again": before}
    timed = interleave(samplers, seconds=seconds, least=LEAST, most=MOST, until=is_told)
    return Compared(timed["before"], timed["after"], found(timed), load_now())
