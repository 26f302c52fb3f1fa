"""Whether another measurement fits before a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLeft:
    """A time limit for measurements that take about as long as each other."""

    def __init__(
        self, seconds: float | None, *, guess_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`seconds`: until the limit; None is no limit. `guess_s`: what one takes until one has been made."""
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds
        self._guess_s = guess_s
        self._longest: float | None = None
        self._began: float | None = None

    def another(self) -> bool:
        """Whether to begin another one, by the longest so far; the one before it has ended."""
        now = self._clock()
        if self._began is not None:
            self._longest = max(now - self._began, self._longest or 0.0)
        self._began = now
        expected = self._guess_s if self._longest is None else self._longest
        return self._end is None or now + expected <= self._end

    def most_s(self, limit_s: float) -> float:
        """Seconds that the one that begins may take: the limit, or what is left."""
        return limit_s if self._end is None else max(1.0, min(limit_s, self._end - self._clock()))
