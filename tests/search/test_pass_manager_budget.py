"""The pass manager and its time budget."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch import nn

from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Family, Numerics, Pass, Result
from ampopt.measure.entry import Verdict
from tests.support.planted import Bench, Planted, PlantedFoundation

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
GOOD = Planted("good")
FASTER = {"good": 0.5}


@pytest.fixture
def net() -> nn.Module:
    return nn.Linear(4, 4).eval()


def test_nothing_is_tried_once_the_budget_is_spent(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    broken = Planted("broken", error=AssertionError("it was applied"))
    entries = Bench(monkeypatch, net, X, cost=FASTER, seconds_left=-1.0).rewrite(broken, GOOD)
    assert [(e.verdict, e.reason) for e in entries] == [(Verdict.NOT_TRIED, "the time budget was spent")] * 2


def test_a_pass_that_needs_more_than_is_left_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    long = Planted("long", seconds=500.0, error=AssertionError("it was applied"))
    first, second = Bench(monkeypatch, net, X, cost=FASTER, seconds_left=100.0).rewrite(long, GOOD)
    assert first.verdict is Verdict.NOT_TRIED
    assert "it needs about 500 s, and 100 s of the budget are left" in first.reason
    assert second.verdict is Verdict.KEPT


@dataclasses.dataclass(frozen=True)
class _Thorough(Planted, Engine):
    """Takes long, unless it is hurried."""

    def hurried(self) -> Engine:
        return dataclasses.replace(self, label="hurried", seconds=50.0, error=None)


@pytest.mark.parametrize(
    ("seconds_left", "found"), [(1000.0, "failed"), (100.0, "kept"), (20.0, "not tried")]
)
def test_a_pass_hurries_where_that_is_what_the_time_allows(
    seconds_left: float, found: str, monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    step = _Thorough("thorough", seconds=500.0, error=ValueError("it was not hurried"))
    bench = Bench(monkeypatch, net, X, cost=lambda _names: 0.5 if _names else 1.0, seconds_left=seconds_left)
    (entry,) = bench.rewrite(step)
    assert entry.verdict.value == found
    assert bench.kept == (["hurried"] if found == "kept" else [])
    if found == "not tried":
        assert "it needs about 50 s, and 20 s of the budget are left" in entry.reason


@dataclasses.dataclass(frozen=True)
class _Measuring(Planted):
    """Writes into its recipe how much time it was given."""

    def within(self, seconds: float) -> Pass:
        return dataclasses.replace(self, seconds=seconds)


def test_a_pass_that_measures_is_told_what_is_left_alone_and_in_a_replay(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    slow = {"layout": 1.5, frozenset({"layout", "measuring"}): 0.4}

    def cost(names: frozenset[str]) -> float:
        return slow.get(names, 1.5 if "layout" in names else 0.9)

    bench = Bench(monkeypatch, net, X, cost=cost, seconds_left=100.0)
    bench.rewrite(Planted("layout"), _Measuring("measuring"))
    assert bench.kept == ["layout", "measuring"]
    (measuring,) = (step for step in bench.state.best.program.recipe if isinstance(step, _Measuring))
    assert 0 < measuring.seconds <= 100


@dataclasses.dataclass(frozen=True)
class _Engine(Planted, Engine):
    family = Family.ENGINE


@pytest.mark.parametrize(("engine", "seconds"), [(False, 101), (True, 151)])
def test_what_there_is_no_time_left_to_judge_is_not_begun(
    engine: bool, seconds: int, monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost=FASTER, seconds_left=50.0)
    bench.state.call_s = 5.0
    bench.rewrite(
        (_Engine if engine else Planted)("step", seconds=1.0, error=AssertionError("it was applied"))
    )
    (entry,) = bench.ledger.entries
    assert entry.verdict is Verdict.NOT_TRIED
    assert entry.reason == f"it needs about {seconds} s, and 50 s of the budget are left"


@dataclasses.dataclass(frozen=True)
class _Overdue(_Engine):
    """Takes longer than is left."""

    def apply(self, program: Program) -> Result:
        time.sleep(max(0.0, self.factor - time.perf_counter()))
        return Result(program.replace(engine=program.graph), 1)


@dataclasses.dataclass(frozen=True)
class _Launch(Pass):
    numerics = Numerics.REASSOCIATED
    family = Family.LAUNCH
    portable = False

    def apply(self, program: Program) -> Result:
        return Result(program.replace(settings=dataclasses.replace(program.settings, tf32=True)), 1)


def test_what_an_engine_made_is_judged_although_it_took_all_that_was_left(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"late": 0.5}, seconds_left=1.0)
    bench.run_in([_Overdue("late", factor=bench.deadline + 0.1)], [_Launch()])
    (entry,) = bench.ledger.entries
    assert (entry.name, entry.verdict) == ("late + _-launch", Verdict.KEPT)
    assert time.perf_counter() > bench.deadline


def test_trials_are_expected_to_take_less_where_the_best_has_become_faster(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost=FASTER, seconds_left=150.0)
    bench.state.call_s = 5.0
    first, second, third, *_ = bench.rewrite(
        Planted("long", seconds=100.0), GOOD, Planted("long now", seconds=100.0)
    )
    assert (first.verdict, second.verdict, third.verdict) == (
        Verdict.NOT_TRIED,
        Verdict.KEPT,
        Verdict.REVERTED,
    )
    assert bench.state.call_s == 0.5


def test_a_foundation_is_not_looked_at_longer_for_it_is_kept_all_the_same(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    samples = iter([0.5, 1.5] * 99)
    bench = Bench(monkeypatch, net, X, cost=lambda names: next(samples) if names else 1.0)
    (entry,) = bench.rewrite(PlantedFoundation("foundation"))
    assert entry.after is not None
    assert len(entry.after.latency.samples) == 6


def test_nothing_is_looked_at_longer_than_the_budget_allows(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    samples = iter([0.5, 1.5] * 99)

    def cost(names: frozenset[str]) -> float:
        time.sleep(max(0.0, bench.deadline - time.perf_counter()))  # it passes meanwhile
        return next(samples) if names else 1.0

    bench = Bench(monkeypatch, net, X, cost=cost, seconds_left=3.0)
    (entry, *_) = bench.rewrite(GOOD)
    assert entry.after is not None
    assert len(entry.after.latency.samples) == 6
