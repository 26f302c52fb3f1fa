"""What passes measured for themselves in a lane, and how long they take: for the programs that follow.

A pass that measures (tiles of kernels, the options of an engine) does so once in a lane; in other programs of
the lane its findings are replayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ampopt.ir.lanes import Lane
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Result
from ampopt.search.estimates import expected_s

STARTING_S = 6.0
"""Time in seconds in which the process for rehearsals loads PyTorch and a compiler, once."""

REPEATING = 0.25
"""Time of repeating in this process what was rehearsed in another, as a share of the rehearsal's."""

CHEAP_S = 3.0
"""A pass that measured for at most this time measures anew where it stands alone."""

MEASURED_S, MEASURED_CALLS = 0.5, 4
"""A pass that took longer than this time and this number of calls must have measured something."""


def is_risky(step: Pass) -> bool:
    """Whether another process rehearses the pass, in which it can be stopped at any time."""
    return isinstance(step, Engine) and step.risky


class Choices:
    """The findings and times of the passes of one comparison; see the module."""

    def __init__(self, known: Mapping[tuple[str, str], Pass], measuring_s: float) -> None:
        """`known`: passes, by lane and name, with their findings in their fields.

        `measuring_s`: how much time a pass that measures is told to be left, at most.
        """
        self._replays, self._measuring_s = dict(known), measuring_s
        self._futile: dict[tuple[str, str], str] = {}
        self._measured_s: dict[tuple[str, str], float] = {}
        self._took: dict[tuple[str, bool], tuple[float, float]] = {}

    def pick(self, lane: Lane, step: Pass, program: Program, seconds: float, *, anew: bool) -> Pass:
        """The pass to apply within a time: with its findings, if there are any.

        `anew`: without them, if it measures quickly.
        """
        if not (anew and self._is_cheap(lane, step, seconds)):
            if (replay := self._replays.get((lane.name, step.name))) is not None:
                return replay
            if isinstance(step, Engine) and expected_s(step, program) > seconds:
                step = step.hurried()
        return step.within(min(seconds, self._measuring_s))

    def futile(self, lane: Lane, step: Pass, seconds: float, *, anew: bool) -> str | None:
        """Why the pass, which measured that it gains nothing, is not applied; None if it is."""
        if anew and self._is_cheap(lane, step, seconds):
            return None
        return self._futile.get((lane.name, step.name))

    def _is_cheap(self, lane: Lane, step: Pass, seconds: float) -> bool:
        if isinstance(step, Engine):  # it would run in another way than in the sequence
            return False
        return self._measured_s.get((lane.name, step.name), math.inf) <= min(CHEAP_S, seconds)

    def may_measure(self, lane: Lane, chosen: Pass) -> bool:
        """Whether the pass may use the clock when it is applied in this process."""
        if self.is_replay(lane, chosen) or is_risky(chosen):
            return False
        return not (isinstance(chosen, Engine) and chosen.hurried() == chosen)

    def is_replay(self, lane: Lane, chosen: Pass) -> bool:
        """Whether the pass holds findings of the lane."""
        return chosen == self._replays.get((lane.name, chosen.name))

    def note(
        self,
        lane: Lane,
        step: Pass,
        chosen: Pass,
        program: Program,
        result: Result,
        *,
        took_s: float,
        call_s: float,
    ) -> None:
        """Keep what it showed to apply a pass to a program, as it was `chosen`.

        `took_s` is how long that took, `call_s` the time of a call of the program.
        """
        key = lane.name, step.name
        self._took[step.name, self.is_replay(lane, chosen)] = took_s, expected_s(chosen, program)
        if key in self._measured_s or key in self._replays:
            return
        if result.replay is not None and result.replay != step:
            self._replays[key], self._measured_s[key] = result.replay, took_s
        elif not result.modified and took_s > MEASURED_S + MEASURED_CALLS * call_s:
            self._futile[key], self._measured_s[key] = why_nothing(result), took_s

    def expected_s(self, lane: Lane, chosen: Pass, program: Program) -> float:
        """About how long applying a pass takes, from what it says and from what it took before."""
        said = expected_s(chosen, program)
        if (before := self._took.get((chosen.name, self.is_replay(lane, chosen)))) is not None:
            took_s, said_then = before
            return max(said, took_s * said / said_then if said_then else took_s)
        return said * (1 + REPEATING) if is_risky(chosen) else said


def why_nothing(result: Result) -> str:
    """Why a pass changed nothing: the first place that it declined, with its reason."""
    return f"{result.declined[0].node}: {result.declined[0].reason}" if result.declined else ""
