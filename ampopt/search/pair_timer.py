"""Times pairs of programs in shared rounds: few rounds at first, and more where an interval is wide."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from ampopt.measure.clocks import engine_latency, engine_sample_s
from ampopt.measure.headline import LEAST, MOST
from ampopt.measure.rounds import Batch, Told, between, sample
from ampopt.measure.sampling import Sampler
from ampopt.search.program_store import Built
from ampopt.search.subject import rest_s

FIRST_S = 0.2
"""Time in seconds of a first batch of short calls; longer ones get `LEAST` rounds."""

AGAIN_S = 0.6
"""Time in seconds of a further batch."""

LEAST_AGAIN = 3
"""Rounds of a further batch: each one also calls its programs without timing them."""

Timed = tuple[Built, Built]
"""A program, and the one that is compared with it."""


class PairTimer:
    """The samples of all programs of a comparison; see the module."""

    def __init__(
        self,
        device: torch.device,
        deadline: float,
        silence: Callable[[], contextlib.AbstractContextManager[object]],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`deadline` is on the clock `now`; no rounds are begun that would end after it.

        `silence`: the block in which no other process of ours takes time from the programs.
        """
        self._device, self._deadline, self._silence, self._now = device, deadline, silence, now
        self._samplers: dict[str, Sampler] = {}
        self._batches: list[Batch] = []

    def told(self, pair: Timed) -> Told | None:
        """What the samples until now say of a pair; None if there are none."""
        return between(self._batches, pair[0].key, pair[1].key)

    def first_s(self, pairs: Sequence[Timed]) -> float:
        """About how long the first batch of these pairs takes."""
        return self._round_s(pairs) * self._first_rounds(pairs)

    def time(self, pairs: Sequence[Timed], rounds: int | None = None) -> None:
        """Sample the programs of these pairs in shared rounds; by default as few as tell anything."""
        programs = _programs(pairs)
        for key, built in programs.items():
            if key not in self._samplers:
                call, rest = built.subject.call, rest_s(built.program)
                self._samplers[key] = engine_latency(call, self._device, last_s=built.call_s, rest_s=rest)
        befores = [before.key for before, _ in pairs]
        with self._silence():
            batch = sample(
                {key: self._samplers[key] for key in programs},
                max(befores, key=befores.count),
                rounds=rounds or self._first_rounds(pairs),
                seconds=max(self._deadline - self._now(), 0.0),
                seed=len(self._batches),
            )
        self._batches.append(batch)
        for key, built in programs.items():
            built.call_s = batch.times[key].median

    def refine(self, pairs: Iterable[Timed]) -> bool:
        """One more batch for every pair that is not told well enough, the widest interval first.

        False if there is none, or no time for any.
        """
        told = {pair: found for pair in dict.fromkeys(pairs) if (found := self.told(pair)) is not None}
        wide = sorted((pair for pair in told if not told[pair].is_enough), key=lambda pair: -told[pair].width)
        groups: dict[str, list[Timed]] = {}
        for pair in wide:
            groups.setdefault(pair[0].key, []).append(pair)
        has_time = False
        for group in groups.values():
            round_s = self._round_s(group)
            left = (self._deadline - self._now()) / round_s
            rounds = max(LEAST_AGAIN, min(MOST, int(AGAIN_S / round_s)))
            if rounds <= left:
                self.time(group, rounds)
                has_time = True
        return has_time

    def _round_s(self, pairs: Sequence[Timed]) -> float:
        """About how long a round takes: one sample of each program, and another of the first."""
        samples = [
            engine_sample_s(p.call_s, self._device, rest_s=rest_s(p.program))
            for p in _programs(pairs).values()
        ]
        return max(sum(samples) + max(samples), 1e-6)

    def _first_rounds(self, pairs: Sequence[Timed]) -> int:
        return max(LEAST, min(MOST, int(FIRST_S / self._round_s(pairs))))


def _programs(pairs: Iterable[Timed]) -> dict[str, Built]:
    return {built.key: built for pair in pairs for built in pair}
