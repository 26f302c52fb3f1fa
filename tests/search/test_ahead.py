"""Rehearsals ahead of their time: one after another, each once; a failure is told when it matters."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from ampopt.errors import PassError
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Rehearsed, Result
from ampopt.search.ahead import Ahead
from ampopt.search.rehearsal import Sandbox, TooLongError
from tests.helpers import program_of
from tests.support.comparing import CPU, Toy, ToyCompiler


class Fake(Sandbox):
    """Rehearses nothing; a rehearsal is over when the test says so, and notes what happens."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.events, self.is_over, self.error = list[str](), False, PassError("crashed")
        self.fails: set[str] = set()

    @contextlib.contextmanager
    def rehearsing(
        self, step: Pass, program: Program, *, seconds: float
    ) -> Iterator[Callable[[], Rehearsed]]:
        """See the class."""
        self.events.append(f"begin {step.name}")
        self.is_over = False

        def answer() -> Rehearsed:
            self.events.append(f"ask {step.name}")
            if step.name in self.fails:
                raise self.error
            return Rehearsed()

        yield answer
        self.events.append(f"end {step.name}")

    def has_answered(self) -> bool:
        """See the class."""
        return self.is_over

    def apply(self, step: Pass, program: Program, *, seconds: float) -> tuple[Result, str | None]:
        """Apply it at once."""
        self.events.append(f"apply {step.name}")
        return step.apply(program), None


ONE, TWO = ToyCompiler("one"), ToyCompiler("two")
LATER = time.perf_counter() + 1e6


@pytest.fixture
def program() -> Program:
    return program_of(nn.ReLU(), torch.ones(2))


@pytest.fixture
def sandbox() -> Fake:
    return Fake()


def test_rehearsals_follow_each_other_and_are_not_repeated(sandbox: Fake, program: Program) -> None:
    with Ahead(sandbox) as ahead:
        for step in (ONE, TWO):
            ahead.rehearse(step, program, LATER)
        assert sandbox.events == ["begin one"]
        sandbox.is_over = True
        ahead.go_on()
        assert sandbox.events == ["begin one", "ask one", "end one", "begin two"]
        result, unrehearsed = ahead.apply(ONE, program, seconds=9.0)
        assert (result.rewrites, unrehearsed) == (1, None)
    assert "apply one" not in sandbox.events
    assert sandbox.events.count("begin one") == 1


def test_one_that_is_still_running_is_waited_for_and_the_next_begins(sandbox: Fake, program: Program) -> None:
    with Ahead(sandbox) as ahead:
        for step in (ONE, TWO):
            ahead.rehearse(step, program, LATER)
        assert ahead.apply(ONE, program, seconds=9.0)[0].modified
        assert sandbox.events[:4] == ["begin one", "ask one", "end one", "begin two"]
        assert ahead.apply(TWO, program, seconds=9.0)[0].modified


def test_other_passes_are_applied_in_between(sandbox: Fake, program: Program) -> None:
    with Ahead(sandbox) as ahead:
        ahead.rehearse(ONE, program, LATER)
        assert ahead.apply(Toy("fold"), program, seconds=9.0)[0].modified
        assert sandbox.events == ["begin one", "apply fold"]


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("error", [PassError("crashed"), TooLongError("too long")])
def test_a_failure_is_told_when_the_pass_is_applied(
    sandbox: Fake, program: Program, error: PassError, is_over: bool
) -> None:
    sandbox.fails, sandbox.error = {"one"}, error
    with Ahead(sandbox) as ahead:
        for step in (ONE, TWO):
            ahead.rehearse(step, program, LATER)
        sandbox.is_over = is_over
        ahead.go_on()
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                ahead.apply(ONE, program, seconds=9.0)
        assert ahead.apply(TWO, program, seconds=9.0)[0].modified
    assert sandbox.events.count("begin one") == 1


def test_what_comes_out_of_turn_is_rehearsed_where_it_is_applied(sandbox: Fake, program: Program) -> None:
    with Ahead(sandbox) as ahead:
        for step in (ONE, TWO):
            ahead.rehearse(step, program, LATER)
        assert ahead.apply(TWO, program, seconds=9.0)[0].modified
        assert sandbox.events == ["begin one", "end one", "apply two"]
        ahead.go_on()
        assert sandbox.events[3:] == []


def test_another_program_is_another_rehearsal(sandbox: Fake, program: Program) -> None:
    with Ahead(sandbox) as ahead:
        ahead.rehearse(ONE, program, LATER)
        ahead.apply(ONE, program.replace(), seconds=9.0)
        assert sandbox.events == ["begin one", "end one", "apply one"]


def test_what_has_no_time_left_is_not_begun(sandbox: Fake, program: Program) -> None:
    with Ahead(sandbox) as ahead:
        ahead.rehearse(ONE, program, time.perf_counter() - 1.0)
        assert sandbox.events == []


def test_at_the_end_nothing_goes_on(sandbox: Fake, program: Program) -> None:
    with Ahead(sandbox) as ahead:
        for step in (ONE, TWO):
            ahead.rehearse(step, program, LATER)
    assert sandbox.events == ["begin one", "end one"]


class Traces(ToyCompiler):
    """Notes that it begins here before the rehearsal is over."""

    def apply_beside(self, program: Program, rehearsed: Callable[[], Rehearsed]) -> Result:
        """See the class."""
        EVENTS.append("trace")
        return Engine.apply_beside(self, program, rehearsed)


EVENTS: list[str] = []


def test_harmless_steps_are_taken_while_it_runs(sandbox: Fake, program: Program) -> None:
    EVENTS.clear()
    sandbox.events = EVENTS
    with Ahead(sandbox) as ahead:
        ahead.rehearse(Traces("traces"), program, LATER)
        ahead.apply(Traces("traces"), program, seconds=9.0)
    assert EVENTS == ["begin traces", "trace", "ask traces", "end traces", "ask traces", "ask traces"]
