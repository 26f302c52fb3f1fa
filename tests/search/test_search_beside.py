"""The search over lanes where compilers work beside it: which program they get, and when."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampopt.ir.lanes import FP32
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Result
from ampopt.measure.entry import Entry
from ampopt.search.openings import Opening
from ampopt.search.search_plan import Search, begin_ahead
from ampopt.system.budget import Budget
from tests.helpers import BF16
from tests.support.planted import Bench, Compiler, Planted, PlantedKernel

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Beside:
    """A sandbox that works beside measurements; it notes what is begun in it."""

    works_beside = True

    def __init__(self) -> None:
        self.told: list[tuple[str, list[str], int]] = []
        self.entries: list[Entry] = []
        self.programs: list[Program] = []

    def begin(self, step: Pass, program: Program) -> None:
        if isinstance(step, Engine):
            self.programs.append(program)
            names = [each.name for each in program.recipe]
            self.told.append((program.lane.name, names, len(self.entries)))

    def give_up(self, program: Program) -> None:
        self.told = [told for told in self.told if told[0] != program.lane.name]

    def is_rehearsing(self, _step: Pass, _program: Program) -> bool:
        return False

    def begun(self, _step: Pass, _program: Program) -> list[Program]:
        return []

    def has_made(self, _step: Pass, _program: Program) -> bool:
        return False

    def ahead_s(self, _step: Pass, _program: Program) -> float:
        return 0.0

    def is_working(self, _step: Pass, _program: Program) -> bool:
        return False

    def expected_s(self, step: Pass, program: Program) -> float:
        return step.expected_seconds(program)

    def apply(self, step: Pass, program: Program, *, seconds: float) -> tuple[Result, str | None]:
        return step.apply(program), None


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Every pass gains a fifth, and a kernel half."""

    def cost(names: frozenset[str]) -> float:
        return 0.8 ** len(names) * (0.5 if "kernel" in names else 1.0)

    def latency(call: Any, _: torch.device) -> Callable[[], float]:
        return lambda: cost(frozenset(step.name for step in call.__self__.program.recipe))

    monkeypatch.setattr("ampopt.search.search_plan.latency", latency)
    monkeypatch.setattr("ampopt.search.lane_search.opening_of", lambda *_: Opening(("one", "two")))
    return Bench(monkeypatch, nn.Linear(4, 4).eval(), X, cost=cost)


@pytest.fixture
def beside(bench: Bench) -> Beside:
    sandbox = Beside()
    sandbox.entries = bench.ledger.entries
    bench.manager.sandbox = sandbox  # type: ignore[assignment]
    return sandbox


BESIDE = Pipeline((Planted("one"), Planted("two"), PlantedKernel("kernel")), (Compiler(),))


@pytest.mark.parametrize("bound", [None, 1e-9])
def test_where_a_compiler_works_beside_the_lowest_precision_is_first_and_gets_its_kernels_at_once(
    bench: Bench, beside: Beside, bound: float | None
) -> None:
    """Where that is too inexact, and so may have to be rescued, FP32 is the first."""
    budget = Budget(time.perf_counter(), 1e6)
    search = Search(bench.manager, bench.verifier, bench.ledger, BESIDE, budget, bound)
    search.run({FP32: 1e-3, BF16: 1e-3}, {})
    rows = [(e.lane, e.name) for e in bench.ledger.entries if e.name in ("the opening", "kernel")]
    if bound is None:
        assert rows[:3] == [("amp", "the opening"), ("amp", "kernel"), ("fp32", "the opening")]
    else:
        assert rows[:2] == [("fp32", "the opening"), ("amp", "the opening")]
    assert [state.lane.name for state in search.states] == ["fp32", "amp"]


def test_a_compiler_gets_the_program_without_kernels_and_after_it_the_one_with_them(
    bench: Bench, beside: Beside
) -> None:
    budget = Budget(time.perf_counter(), 1e6)
    search = Search(bench.manager, bench.verifier, bench.ledger, BESIDE, budget, None)
    search.run({FP32: 1e-3, BF16: 1e-3}, {})
    begun = list(dict.fromkeys((lane, *names) for lane, names, _ in beside.told if lane == "amp"))
    assert begun == [("amp", "one", "two"), ("amp", "one", "two", "kernel")]


@dataclasses.dataclass(frozen=True)
class Reading(Compiler):
    """One that reads programs under autocast."""

    def why_not(self, program: Program) -> None:
        """Nothing is in its way."""


class Making(Beside):
    """Its compiler has made something once it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Program] = []

    def begun(self, _step: Pass, program: Program) -> list[Program]:
        return [each for each in self.programs if each.lane == program.lane]

    def has_made(self, _step: Pass, program: Program) -> bool:
        return program in self.made

    def is_working(self, _step: Pass, program: Program) -> bool:
        self.made.append(program)
        return False


def test_what_a_compiler_makes_of_the_kernels_comes_before_another_lane(bench: Bench) -> None:
    making = Making()
    making.entries = bench.ledger.entries
    bench.manager.sandbox = making  # type: ignore[assignment]
    budget = Budget(time.perf_counter(), 1e6)
    pipeline = Pipeline(BESIDE.rewrites, (Reading(),))
    search = Search(bench.manager, bench.verifier, bench.ledger, pipeline, budget, None)
    search.run({FP32: 1e-3, BF16: 1e-3}, {})
    rows = [(e.lane, e.name) for e in bench.ledger.entries if e.name in ("the opening", "kernel", "reading")]
    assert rows[:2] == [("amp", "the opening"), ("amp", "kernel")]
    assert rows.index(("amp", "reading")) < rows.index(("fp32", "the opening"))


def test_lanes_are_compared_after_the_same_passes(bench: Bench, beside: Beside) -> None:
    """What one of them has gained by its kernels until then does not count."""
    budget = Budget(time.perf_counter(), 1e6)
    search = Search(bench.manager, bench.verifier, bench.ledger, BESIDE, budget, None)
    search.run({FP32: 1e-3, BF16: 1e-3}, {})
    assert not any("after its opening" in note for note in bench.ledger.notes), bench.ledger.notes


def test_compilers_begin_with_what_the_opening_should_come_to(bench: Bench, beside: Beside) -> None:
    program = bench.manager.open(BF16).base
    begin_ahead(program, BESIDE, beside)  # type: ignore[arg-type]
    assert beside.told == [("amp", ["one", "two"], 0)]
    beside.works_beside = False
    begin_ahead(program, BESIDE, beside)  # type: ignore[arg-type]
    begin_ahead(program, BESIDE, None)
    assert len(beside.told) == 1


def test_where_another_lane_comes_first_they_begin_on_that(bench: Bench, beside: Beside) -> None:
    """RT-DETR is wrong in float16: its FP32 program waited for code that was made of the other."""
    began_on = bench.manager.open(BF16).base
    bench.manager.foreseen = begin_ahead(began_on, BESIDE, beside)  # type: ignore[arg-type]
    budget = Budget(time.perf_counter(), 1e6)
    search = Search(bench.manager, bench.verifier, bench.ledger, BESIDE, budget, 1e-9)
    search.run({FP32: 1e-3, BF16: 1e-3}, {})
    assert beside.told[0] == ("fp32", ["one", "two"], 0)


def test_what_is_applied_for_them_is_not_applied_again(bench: Bench, beside: Beside) -> None:
    """The opening's first trial takes it, once."""
    program, steps = bench.manager.open(BF16).base, [Planted("one"), Planted("two")]
    bench.manager.foreseen = begin_ahead(program, BESIDE, beside)  # type: ignore[arg-type]
    made = beside.programs[-1].graph
    state = bench.manager.open(BF16)
    bench.manager.try_together(state, "the opening", steps, bench.manager.deadline)
    assert state.graph.program.graph is made
    again = bench.manager.open(BF16)
    bench.manager.try_together(again, "the opening", steps, bench.manager.deadline)
    assert again.graph.program.recipe == state.graph.program.recipe
    assert again.graph.program.graph is not made
