"""Interleaved samples, medians with confidence intervals, and significance of gains."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ampopt.system.budget import COSTLY_CALL_S

Sampler = Callable[[], float]
"""Takes one sample and returns it in seconds."""

LONG_CALL_S = 0.02
"""From this duration on, a call is timed without an untimed call before it."""

SETTLED = 8
"""After so many calls a subject takes about what it takes in a loop, however short they are."""

FEW, PLAIN = 3, 1.25
"""After so many rounds costly calls tell who is faster, if one is by this factor in each of them.

What disturbs a call for milliseconds is a small share of them.
"""

TOO_WIDE = 1.5
"""From this ratio between its ends on, an interval is too wide to be used.

On a busy machine, where calls of a longer program are interrupted and those of a shorter one are not, the
median of paired ratios may be several times the true ratio; the intervals are then wider than this.
"""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Raw samples in seconds, in the order of measurement, with their statistics."""

    samples: tuple[float, ...]

    def quantile(self, q: float) -> float | None:
        """The sample below which a share `q` of all samples lies, in seconds.

        None if less than one sample is expected beyond it: six samples cannot give a p99.
        """
        return self._quantile(q) if len(self.samples) * (1 - q) >= 1 - 1e-9 else None

    def _quantile(self, q: float) -> float:
        ordered = sorted(self.samples)
        return ordered[max(0, math.ceil(q * len(ordered) - 1e-9) - 1)]

    @property
    def median(self) -> float:
        """The median sample, in seconds."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the interquartile range, as a share of the median."""
        return (self._quantile(0.75) - self._quantile(0.25)) / 2 / self.median

    def interval_of_median(self, miss: float = 0.05) -> tuple[float, float]:
        """The ends of an interval, in seconds, that misses the median with at most this probability.

        They are order statistics, see `gain`; the smallest and the largest sample where there are too few.
        """
        ordered = sorted(self.samples)
        rank = _interval_rank(len(ordered), miss / 2)
        return ordered[rank], ordered[-1 - rank]

    def trimmed_mean(self, share: float) -> float:
        """The mean without a share of the samples at each end, in seconds."""
        ordered = sorted(self.samples)
        cut = int(share * len(ordered))
        return statistics.fmean(ordered[cut : len(ordered) - cut])

    def to_dict(self) -> dict[str, Any]:
        """Quantiles in milliseconds and the number of samples, for JSON; null for too few samples."""
        names = {"p50_ms": self.median, "p90_ms": self.quantile(0.9), "p99_ms": self.quantile(0.99)}
        values = {name: None if value is None else round(1e3 * value, 6) for name, value in names.items()}
        return {**values, "spread": round(self.spread, 4), "samples": len(self.samples)}


@dataclasses.dataclass(frozen=True)
class Gain:
    """How many times faster `after` is than `before`: the median of paired ratios and its interval.

    The interval is of 95 % confidence as `gain` finds it in six pairs or more, and wider as
    `headline.sure_gain` does.
    """

    ratio: float
    low: float
    high: float

    @property
    def is_real(self) -> bool:
        """Whether `after` is significantly faster, by at least half a percent."""
        return self.low > 1.0 and self.ratio >= 1.005

    @property
    def is_loss(self) -> bool:
        """Whether `after` is significantly slower, by at least half a percent."""
        return self.high < 1.0 and self.ratio <= 0.995

    @property
    def is_told(self) -> bool:
        """Whether it is known which of the two is faster."""
        return self.is_real or self.is_loss

    @property
    def is_plain(self) -> bool:
        """Whether all of the interval is on one side of a factor of `PLAIN`."""
        return self.low > PLAIN or self.high < 1 / PLAIN

    @property
    def is_vague(self) -> bool:
        """Whether the ends of the interval are further apart than `TOO_WIDE`."""
        return self.high > TOO_WIDE * self.low

    @property
    def is_surely_faster(self) -> bool:
        """Whether it is faster though its interval may be too wide to tell by how much: all of it is."""
        return self.low > TOO_WIDE

    @property
    def at_least(self) -> float:
        """The speedup to report: the lower end, rounded down to hundredths; 1 if not significant."""
        return math.floor(100 * self.low + 1e-9) / 100 if self.is_real and not self.is_vague else 1.0


def gain(before: Measurement, after: Measurement) -> Gain:
    """Compare two interleaved measurements sample by sample.

    The interval holds the median of the ratios with 95 % confidence whatever their distribution: its ends
    are order statistics with binomial(n, 1/2) ranks (Conover, Practical Nonparametric Statistics, 3.2). Those
    of fewer than six pairs are the smallest and the largest ratio, with less confidence: 75 % for three.
    """
    ratios = sorted(b / a for b, a in zip(before.samples, after.samples, strict=True))
    rank = _interval_rank(len(ratios))
    return Gain(statistics.median(ratios), ratios[rank], ratios[len(ratios) - 1 - rank])


def tells_soon(before: Measurement, after: Measurement) -> bool:
    """Whether few rounds of costly calls tell which is faster, though an interval of 95 % would need six."""
    is_costly = min(before.median, after.median) >= COSTLY_CALL_S
    return is_costly and len(before.samples) >= FEW and gain(before, after).is_plain


def joined(first: Measurement, second: Measurement) -> Measurement:
    """The samples of both measurements as one."""
    return Measurement(first.samples + second.samples)


def _interval_rank(n: int, tail_at_most: float = 0.025) -> int:
    """The largest r for which the median is below order statistic r with at most this probability.

    It counts outcomes of n coins in whole numbers: floats do not hold those of more than 1029.
    """
    most = int(Fraction(tail_at_most) * 2**n)
    outcomes, further, rank = 1, n, 0
    while outcomes + further <= most and rank + 1 < n / 2:
        outcomes, rank = outcomes + further, rank + 1
        further = further * (n - rank) // (rank + 1)
    return rank


def interleave(
    samplers: Mapping[str, Sampler],
    *,
    seconds: float,
    least: int = 6,
    most: int = 400,
    warm_up: bool = True,
    seed: int = 0,
    until: Callable[[Mapping[str, Measurement]], bool] | None = None,
) -> dict[str, Measurement]:
    """Sample every subject once a round (A C B, then B C A, …) until `seconds` have passed.

    At least `least` rounds are made and at most `most`; with `warm_up`, one round before them is not counted.
    Rounds have random orders of `seed`, each followed by itself backwards: who comes after whom matters by a
    percent in calls of 0.1 ms, and so each subject comes before each other as often as after it. `until`
    decides whether to stop, also before `least` rounds: after `FEW`, and each time after half as many more.
    """
    for sampler in samplers.values() if warm_up else ():
        sampler()
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    orders = _balanced_orders(list(samplers), random.Random(seed))
    end, rounds, asked = time.perf_counter() + seconds, 0, FEW
    while rounds < least or (rounds < most and time.perf_counter() < end):
        if until is not None and rounds == asked:
            if until(_measured(samples)):
                break
            asked += max(1, asked // 2)
        for name in next(orders):
            samples[name].append(samplers[name]())
        rounds += 1
    return _measured(samples)


def _balanced_orders(names: Sequence[str], draw: random.Random) -> Iterator[Sequence[str]]:
    """Orders of the names without end, each followed by itself backwards."""
    while True:
        order = draw.sample(names, len(names))
        yield order
        yield order[::-1]


def _measured(samples: Mapping[str, Sequence[float]]) -> dict[str, Measurement]:
    return {name: Measurement(tuple(values)) for name, values in samples.items()}


def rested(sampler: Sampler, pause_s: float) -> Sampler:
    """Samples after a pause, in which the threads of the previous subject stop spinning."""

    def after_pause() -> float:
        time.sleep(pause_s)
        return sampler()

    return after_pause


def latency(
    call: Callable[[], object],
    synchronize: Callable[[], None] = lambda: None,
    *,
    long_s: float = LONG_CALL_S,
    last_s: float = 0.0,
    settle_s: float = 0.0,
) -> Sampler:
    """A sampler of the latency of one call and of `synchronize`, by the host's clock.

    An untimed call runs before each timed one, so that the caches hold the subject's own data and not that of
    other subjects; from `long_s` on, caches do not matter. With `settle_s`, untimed calls run for as many
    seconds, at most `SETTLED`. `last_s` is the time of the last call before these, if known.
    """
    last = last_s

    def sample() -> float:
        nonlocal last
        if last < long_s:
            settled = time.perf_counter() + settle_s
            call()
            for _ in range(SETTLED - 1):
                if time.perf_counter() >= settled:
                    break
                synchronize()
                call()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        last = time.perf_counter() - start
        return last

    return sample
