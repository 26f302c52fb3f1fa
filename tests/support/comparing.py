"""A comparison on a made-up machine: passes, verifications and calls take what a test says they take."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.numerics import Check
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Family, Numerics, Pass, Result
from ampopt.measure.clocks import LONG_ENGINE_CALL_S, REST_S
from ampopt.measure.compared import ComparedPass
from ampopt.search.choices import Choices
from ampopt.search.compare_plan import Plan
from ampopt.search.comparer import Comparer
from ampopt.search.program_store import ProgramStore
from ampopt.search.rehearsal import TooLongError
from tests.support.planted import captured_of

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Toy(Pass):
    """A pass that changes nothing but the recipe, or not even that.

    `seconds`: how long it takes; `said`: how long it says that it takes; `found`: what it has measured.
    """

    numerics = Numerics.BITWISE
    family = Family.REWRITE
    portable = True

    label: str
    seconds: float = 0.0
    said: float = 0.0
    declines: str | None = None
    fails: str | None = None
    works: bool = True
    measures: bool = False
    found: str | None = None
    hint: str | None = None
    unread: str = ""
    """It declines programs with the pass of this name."""

    @property
    def name(self) -> str:
        """Its label."""
        return self.label

    def why_not(self, program: Program) -> str | None:
        """What it was told to say."""
        if self.unread in {step.name for step in program.recipe}:
            return f"it cannot read {self.unread}"
        return self.declines

    def expected_seconds(self, program: Program) -> float:
        """What it was told to say, for as long as it has measured nothing."""
        return self.said if self.found is None else 0.0

    def apply(self, program: Program) -> Result:
        """Change the program, on paper."""
        if self.fails is not None:
            raise ValueError(self.fails)
        if not self.works:
            return Result(program, 0)
        replay = dataclasses.replace(self, found=self.found or "best") if self.measures else None
        return Result(program.replace(), 1, hints=(self.hint,) if self.hint else (), replay=replay)


@dataclasses.dataclass(frozen=True)
class ToyKernel(Toy):
    """A rewrite that engines may not read."""

    family = Family.KERNEL


@dataclasses.dataclass(frozen=True)
class ToyLaunch(Toy):
    """A way to launch."""

    family = Family.LAUNCH


@dataclasses.dataclass(frozen=True)
class ToyEngine(Toy, Engine):
    """An engine."""

    family = Family.ENGINE
    portable = False

    def hurried(self) -> Engine:
        """One that has measured nothing, and does not."""
        return (
            dataclasses.replace(self, found=self.found or "default", seconds=0.0) if self.measures else self
        )

    def apply(self, program: Program) -> Result:
        """Let the graph run the graph."""
        result = Toy.apply(self, program)
        return dataclasses.replace(result, program=result.program.replace(engine=program.graph))


@dataclasses.dataclass(frozen=True)
class ToyCompiler(ToyEngine):
    """An engine that is rehearsed in another process."""

    risky = True


class Machine:
    """A clock that passes, verifications and calls move on, and a count of what was done.

    `cost`: seconds of a call by the names of a program's passes; `noise`: the deviation of their logarithms.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cost: Callable[[frozenset[str]], float], noise: float
    ):
        self.time, self.random, self._cost, self._noise = 0.0, random.Random(0), cost, noise
        self.applied, self.checked, self.calls = list[str](), Counter[str](), Counter[str]()
        self.chosen: list[Toy] = []
        self.wrong: dict[str, str] = {}
        """Reasons why programs with a pass of this name are wrong."""
        self.wrong_recipes: dict[str, str] = {}
        """The same for programs with exactly these passes."""
        self.check_s = 0.0
        self.noises: dict[str, float] = {}
        """The noise of programs with a pass of this name."""
        self.uncallable: set[str] = set()
        """Passes whose programs fail when they are called, alone in their recipe."""
        self.interrupt_at = float("inf")
        self.pauses, self.is_paused, self.rehearsed = 0, False, list[tuple[str, float]]()
        monkeypatch.setattr("ampopt.search.pair_timer.engine_latency", self._sampler)

    def now(self) -> float:
        """Seconds since the start."""
        return self.time

    def pass_by(self, seconds: float) -> None:
        """Move the clock on; Ctrl-C comes when its time has come."""
        self.time += seconds
        if self.time >= self.interrupt_at:
            self.interrupt_at = float("inf")
            raise KeyboardInterrupt

    def apply(self, step: Pass, program: Program, *, seconds: float) -> tuple[Result, str | None]:
        """As a sandbox does: what is risky is stopped after so many seconds."""
        assert isinstance(step, Toy)
        self.applied.append(f"{names_of(program)} > {step.name}")
        self.chosen.append(step)
        took = 0.0 if step.found is not None else step.seconds
        if isinstance(step, ToyCompiler) and took > seconds:
            self.pass_by(seconds)
            raise TooLongError("stopped")
        self.pass_by(took)
        return step.apply(program), None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """As a sandbox does."""
        self.pauses += 1
        self.is_paused = True
        yield
        self.is_paused = False

    def rehearse(self, step: Engine, program: Program, until: float) -> None:
        """Note what would be rehearsed ahead, and until when."""
        self.rehearsed.append((f"{program.lane.name}: {names_of(program)} > {step.name}", until))

    def check(self, run: Any, lane: Lane) -> Check:
        """As a verifier does."""
        program = run.__self__
        assert self.is_paused
        self.checked[f"{lane.name}: {names_of(program)}"] += 1
        self.pass_by(self.check_s)
        names = {step.name for step in program.recipe}
        wrong = self.wrong_recipes.get(names_of(program))
        return Check(1e-7, 1e-5, next((why for name, why in self.wrong.items() if name in names), wrong))

    def _sampler(
        self, call: Any, device: torch.device, *, last_s: float = 0.0, rest_s: float = 0.0
    ) -> Callable[[], float]:
        program = call.__self__.program
        names = frozenset(step.name for step in program.recipe)
        cost, noise = (
            self._cost(names),
            max((self.noises.get(name, self._noise) for name in names), default=0),
        )

        def sample() -> float:
            assert self.is_paused
            if names and names <= self.uncallable:
                raise RuntimeError("it does not run")
            took = cost * self.random.lognormvariate(0, noise)
            self.calls[f"{program.lane.name}: {names_of(program)}"] += 1
            self.pass_by(REST_S + took if cost >= LONG_ENGINE_CALL_S else 2 * took)
            return took

        return sample


def names_of(program: Program) -> str:
    """The names of a program's passes in their order."""
    return " + ".join(step.name for step in program.recipe)


class Compared:
    """A comparison that has ended: its rows by lane, pass and mode, and its machine."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *passes: Pass,
        cost: Callable[[frozenset[str]], float] = lambda names: 0.01,
        noise: float = 0.01,
        budget_s: float = 60.0,
        lanes: Sequence[Lane] = (FP32,),
        known: Mapping[tuple[str, str], Pass] | None = None,
        **facts: Any,
    ) -> None:
        """`facts`: attributes of the machine."""
        self.machine = machine = Machine(monkeypatch, cost, noise)
        for name, value in facts.items():
            setattr(machine, name, value)
        program = captured_of(nn.ReLU(), torch.ones(2))[1].program
        choices = Choices(known or {}, budget_s / 4)
        store = ProgramStore(program, machine, machine, choices, calls_to_check=10, now=machine.now)
        for lane in lanes:
            store.start(lane, cost(frozenset()))
        self.comparer = comparer = Comparer(
            Plan(Pipeline.of(passes), lanes),
            store,
            device=CPU,
            started=0.0,
            deadline=budget_s,
            tell=lambda _lane, _name: None,
            now=machine.now,
        )
        comparer.run()
        self.took_s = machine.time
        self.rows = {(row.lane, row.name, row.mode): row for row in comparer.rows()}
        self.notes, self.interrupted = comparer.notes(), comparer.interrupted

    def __getitem__(self, key: tuple[str, str]) -> ComparedPass:
        """The FP32 row of a pass in a mode."""
        name, mode = key
        return self.rows["fp32", name, mode]

    def reasons(self, name: str) -> list[str]:
        """The reasons in the FP32 rows of a pass: alone, cumulative, left out."""
        return [row.reason for (lane, each, _), row in self.rows.items() if (lane, each) == ("fp32", name)]
