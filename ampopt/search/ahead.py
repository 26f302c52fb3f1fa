"""Rehearsals ahead of their time: in another process, while this one builds other programs.

On two cores a compiler takes tens of seconds, mostly on one of them. Timings and verifications stop it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from ampopt.errors import PassError
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Rehearsed, Result, outcome
from ampopt.search.rehearsal import Sandbox

Key = tuple[str, int]
"""A pass's name and the identity of a program, which its job keeps alive."""


class Ahead:
    """A sandbox that rehearses risky passes in the order in which it is told that they will be applied."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._jobs: deque[tuple[Engine, Program, float]] = deque()
        self._running: tuple[Engine, Program] | None = None
        self._context = contextlib.ExitStack()
        self._answer: Callable[[], Rehearsed] = Rehearsed
        self._over: dict[Key, tuple[Program, Callable[[], Rehearsed]]] = {}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.clear()
        self._stop()

    def rehearse(self, step: Engine, program: Program, until: float) -> None:
        """Rehearse a pass that will be applied, until a time on `time.perf_counter`'s clock."""
        self._jobs.append((step, program, until))
        self.go_on()

    def go_on(self) -> None:
        """Take the answer of a rehearsal that is over, and begin the next one."""
        if self._running is not None and self._sandbox.has_answered():
            self._take_answer()
        while self._running is None and self._jobs:
            step, program, until = self._jobs.popleft()
            if (seconds := until - time.perf_counter()) > 0:
                rehearsing = self._sandbox.rehearsing(step, program, seconds=seconds)
                self._answer = self._context.enter_context(rehearsing)
                self._running = step, program

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Stop what runs in the other process during the block."""
        return self._sandbox.paused()

    def apply(self, step: Pass, program: Program, *, seconds: float) -> tuple[Result, str | None]:
        """As `Sandbox.apply`; what was or is being rehearsed is not rehearsed again."""
        self.go_on()
        if not isinstance(step, Engine) or not step.risky:
            return self._sandbox.apply(step, program, seconds=seconds)
        key = step.name, id(program)
        if self._running is not None and key == (self._running[0].name, id(self._running[1])):

            def rehearsed() -> Rehearsed:
                if key not in self._over:
                    self._take_answer()
                    self.go_on()
                return self._over[key][1]()

            result = outcome(program, lambda given: step.apply_beside(given, rehearsed))
            return result, rehearsed().why_not
        if key in self._over:
            answer = self._over[key][1]
            result = outcome(program, lambda given: step.apply_beside(given, answer))
            return result, answer().why_not
        self._stop()  # another one was expected
        self._jobs = deque(job for job in self._jobs if (job[0].name, id(job[1])) != key)
        return self._sandbox.apply(step, program, seconds=seconds)

    def _take_answer(self) -> None:
        """Wait for the answer of the rehearsal that is running; what failed in it is told by `apply`."""
        assert self._running is not None
        step, program = self._running
        with contextlib.suppress(PassError):
            self._answer()
        self._over[step.name, id(program)] = program, self._answer
        self._stop()

    def _stop(self) -> None:
        """End the rehearsal that is running; if it has not answered, its process is killed."""
        self._running = None
        self._context.close()
