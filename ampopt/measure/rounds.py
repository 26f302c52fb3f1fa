"""Samples of several programs taken in the same rounds, and the gains between any two of them.

A program that is compared with several others is sampled once for all of them. Every round also samples one
program twice: by as much as that may differ from itself, every interval is widened (`headline.sure_gain`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ampopt.measure.headline import ENOUGH, LEAST, MOST, NARROW, sure_gain
from ampopt.measure.sampling import Gain, Measurement, Sampler, gain, interleave

AGAIN = "again"
"""The name of the second sample of a round's program that is sampled twice."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The samples of some rounds by the programs' keys; `twice` is the program that was sampled twice."""

    times: Mapping[str, Measurement]
    twice: str
    again: Measurement


@dataclasses.dataclass(frozen=True)
class Told:
    """What the rounds that two programs share say: the times of the second, and its gain over the first."""

    after: Measurement
    gain: Gain

    @property
    def width(self) -> float:
        """The ratio between the ends of the interval."""
        return self.gain.high / self.gain.low

    @property
    def is_enough(self) -> bool:
        """Whether more samples would tell little more."""
        rounds = len(self.after.samples)
        return rounds >= MOST or (rounds >= ENOUGH and self.width <= NARROW)


def sample(samplers: Mapping[str, Sampler], twice: str, *, rounds: int, seconds: float, seed: int) -> Batch:
    """Sample all programs in random order, one of them twice: up to `rounds` rounds within `seconds`.

    At least `LEAST` rounds are made, or `rounds` if that is less. No round comes before them: the programs
    have been verified, and so have run.
    """
    timed = interleave(
        {**samplers, AGAIN: samplers[twice]},
        seconds=seconds,
        least=min(LEAST, rounds),
        most=rounds,
        warm_up=False,
        seed=seed,
    )
    return Batch({key: timed[key] for key in samplers}, twice, timed[AGAIN])


def between(batches: Iterable[Batch], before: str, after: str) -> Told | None:
    """What the rounds with both programs say; None if there are none."""
    shared = [batch for batch in batches if before in batch.times and after in batch.times]
    if not shared:
        return None
    first, second = (_joined([batch.times[key] for batch in shared]) for key in (before, after))
    once = _joined([batch.times[batch.twice] for batch in shared])
    control = gain(once, _joined([batch.again for batch in shared]))
    return Told(second, sure_gain(first, second, control))


def _joined(parts: Sequence[Measurement]) -> Measurement:
    return Measurement(tuple(value for part in parts for value in part.samples))
