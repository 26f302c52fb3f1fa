"""The distinct programs of a comparison: each is built once, verified once, and known by its passes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from ampopt.errors import first_line
from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Result, exits_failed
from ampopt.search.choices import REPEATING, Choices, is_risky, why_nothing
from ampopt.search.estimates import expected_s, why_not
from ampopt.search.rehearsal import TooLongError
from ampopt.search.subject import Subject
from ampopt.system.interrupts import check_interrupted


class Checks(Protocol):
    """What verifies programs, see `measure.verify.Verifier`."""

    def check(self, run: Callable[..., Any], lane: Lane) -> Check:
        """Verify a function of flat tensors as a program of the lane."""
        ...


class Applies(Protocol):
    """What applies passes, see `search.ahead.Ahead`."""

    def apply(self, step: Pass, program: Program, *, seconds: float) -> tuple[Result, str | None]:
        """Apply a pass; a risky one in another process first, within so many seconds."""
        ...

    def paused(self) -> contextlib.AbstractContextManager[object]:
        """Stop what runs in the other process during the block."""
        ...

    def rehearse(self, step: Engine, program: Program, until: float) -> None:
        """Rehearse a risky pass that will be applied, while other work goes on, until a time."""
        ...


class NoTimeError(Exception):
    """There is not enough time left for something that takes about `needed_s` seconds."""

    def __init__(self, needed_s: float) -> None:
        super().__init__(f"it needs about {needed_s:.3g} s")
        self.needed_s = needed_s


@dataclasses.dataclass(eq=False)
class Built:
    """A distinct program of a lane: the passes that changed something, and what is known of it.

    `call_s` is the time of a call in seconds as far as known.
    """

    lane: Lane
    program: Program
    names: tuple[str, ...]
    call_s: float
    check: Check | None = None

    @functools.cached_property
    def subject(self) -> Subject:
        """The program as its user calls it."""
        return Subject(self.program)

    @property
    def key(self) -> str:
        """Its lane and passes; no other program of the comparison has the same."""
        return f"{self.lane.name}: {' + '.join(self.names)}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What applying a pass to a program came to: another program, or why there is none."""

    built: Built | None
    reason: str = ""
    failed: bool = False


class ProgramStore:
    """Builds and verifies programs; see the module."""

    def __init__(
        self,
        captured: Program,
        verifier: Checks,
        sandbox: Applies,
        choices: Choices,
        *,
        calls_to_check: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`calls_to_check`: calls in the first verification of a lane."""
        self._captured, self._verifier, self._sandbox, self._choices = captured, verifier, sandbox, choices
        self._calls_to_check, self._now = calls_to_check, now
        self.hints: dict[str, None] = {}
        """What engines found, as the keys."""
        self._outcomes: dict[tuple[str, str], Outcome] = {}
        self._starts: dict[Lane, Built] = {}
        self._check_s: dict[Lane, float] = {}
        self._stopped_after_s: dict[tuple[str, str], float] = {}

    def start(self, lane: Lane, call_s: float = 0.0) -> Built:
        """The captured program in a lane; `call_s` at first: the time of a call of it in seconds."""
        if lane not in self._starts:
            self._starts[lane] = Built(lane, lane.start(self._captured), (), call_s)
        return self._starts[lane]

    def apply(
        self, built: Built, step: Pass, seconds: float, *, spare_s: float = math.inf, anew: bool = False
    ) -> Outcome:
        """Apply a pass to a program within a time, measurements of its own within `spare_s`.

        `anew`: a pass that measures quickly does so again. Raises NoTimeError where the time is too short.
        """
        key = (built.key, step.name)
        if seconds <= self._stopped_after_s.get(key, -math.inf):
            raise NoTimeError(2 * self._stopped_after_s[key])
        if key not in self._outcomes:
            try:
                self._outcomes[key] = self._apply(built, step, seconds, min(spare_s, seconds), anew=anew)
            except TooLongError:
                self._stopped_after_s[key] = seconds
                raise NoTimeError(2 * seconds) from None
            except NoTimeError:
                raise
            except Exception as error:
                check_interrupted(error)
                self._outcomes[key] = Outcome(None, f"failed: {first_line(error)}", failed=True)
        return self._outcomes[key]

    def silence(self) -> contextlib.AbstractContextManager[object]:
        """Let no other process of ours work during the block, so that times are right."""
        return self._sandbox.paused()

    def check(self, built: Built) -> Check:
        """The program's verification."""
        if built.check is None:
            began = self._now()
            with self.silence():
                built.check = built.subject.checked(
                    lambda: self._verifier.check(built.subject.run, built.lane)
                )
            self._check_s[built.lane] = self._now() - began
        return built.check

    def check_s(self, built: Built) -> float:
        """About how long `check` takes."""
        return 0.0 if built.check is not None else self.next_check_s(built)

    def next_check_s(self, built: Built) -> float:
        """About how long `check` of a program that is made from this one takes."""
        return self._check_s.get(built.lane, self._calls_to_check * built.call_s)

    def rehearse(self, built: Built, step: Pass, seconds: float) -> None:
        """Let a risky pass that will be applied to the program be rehearsed from now on."""
        if not isinstance(step, Engine) or not step.risky or why_not(step, built.program) is not None:
            return
        if expected_s(step, built.program) <= seconds:
            self._sandbox.rehearse(step, built.program, self._now() + seconds / (1 + REPEATING))

    def expected_s(self, built: Built, step: Pass) -> float:
        """About how long `apply` takes."""
        if (built.key, step.name) in self._outcomes or why_not(step, built.program) is not None:
            return 0.0
        chosen = self._choices.pick(built.lane, step, built.program, math.inf, anew=False)
        return self._choices.expected_s(built.lane, chosen, built.program)

    @exits_failed()
    def _apply(self, built: Built, step: Pass, seconds: float, spare_s: float, *, anew: bool) -> Outcome:
        lane, program, choices, began = built.lane, built.program, self._choices, self._now()
        if (why := step.why_not(program) or choices.futile(lane, step, spare_s, anew=anew)) is not None:
            return Outcome(None, why)
        chosen = choices.pick(lane, step, program, spare_s, anew=anew)
        likely_s = choices.expected_s(lane, chosen, program)
        # What can be stopped at any time is begun wherever it may end in time.
        if (expected_s(chosen, program) if is_risky(chosen) else likely_s) > seconds:
            raise NoTimeError(likely_s)
        with self.silence() if choices.may_measure(lane, chosen) else contextlib.nullcontext():
            result, _ = self._sandbox.apply(chosen, program, seconds=seconds / (1 + REPEATING))
        took_s = self._now() - began
        choices.note(lane, step, chosen, program, result, took_s=took_s, call_s=built.call_s)
        if not result.modified:
            return Outcome(None, why_nothing(result))
        if isinstance(step, Engine):
            self.hints.update(dict.fromkeys(f"{lane.name} lane: {hint}" for hint in result.hints))
        recipe = (*result.program.recipe, result.replay or chosen)
        changed = result.program.replace(recipe=recipe)
        made = Built(lane, changed, (*built.names, step.name), built.call_s)
        if changed.cuda_graph:
            made.subject.call()  # captured now: where that fails, so has this pass
        return Outcome(made)
