"""The state of the search in one lane."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn

from ampopt.ir.program import Program
from ampopt.ir.transform import Result, replay
from ampopt.search.lane_state import MOST_MADE
from tests.support.planted import Bench, Planted

X = torch.ones(2, 4)


def test_judging_is_expected_to_take_as_long_as_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(4, 4), X, cost={"good": 0.5})
    assert bench.state.judging_s == 0.0
    bench.rewrite(Planted("good"))
    assert 0 < bench.state.judging_s < 60
    bench.state.judging = [1.0, 5.0, 2.0]
    assert bench.state.judging_s == 2.0


def test_the_graph_is_the_best_until_an_engine_or_a_launch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(4, 4), X, cost={"good": 0.5})
    assert bench.state.best is bench.state.graph
    bench.rewrite(Planted("good"))
    assert bench.state.best is bench.state.graph
    assert (bench.state.best_s, bench.state.call_s) == (0.5, 0.5)


@dataclasses.dataclass(frozen=True)
class Counted(Planted):
    """Notes when it is applied."""

    applied: ClassVar[list[str]] = []

    def apply(self, program: Program) -> Result:
        """See the class."""
        self.applied.append(self.label)
        return super().apply(program)


def test_what_was_made_of_the_first_passes_of_a_recipe_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = Bench(monkeypatch, nn.Linear(4, 4), X, cost={}).state
    one, two, three = (Counted(name, factor=2.0) for name in ("one", "two", "three"))
    applied: list[str] = []
    monkeypatch.setattr(Counted, "applied", applied)
    assert state.replayed(()) is state.base
    first = state.replayed((one, two))
    assert first.recipe == (one, two)
    assert state.replayed((one, two)) is first
    assert applied == ["one", "two"]
    longer = state.replayed((one, two, three))
    assert longer.recipe == (one, two, three)
    assert applied == ["one", "two", "three"]
    assert state.replayed((one, three)).recipe == (one, three)  # `one` by itself was not kept
    assert applied == ["one", "two", "three", "one", "three"]
    (whole,), (again,) = longer.run(X), replay((one, two, three), state.base).run(X)
    assert torch.equal(whole, again)


def test_only_the_latest_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Bench(monkeypatch, nn.Linear(4, 4), X, cost={}).state
    passes = [Planted(f"{number}") for number in range(MOST_MADE + 1)]
    made = [state.replayed((step,)) for step in passes]
    assert len(state.made) == MOST_MADE
    assert state.replayed((passes[-1],)) is made[-1]
    assert state.replayed((passes[0],)) is not made[0]
