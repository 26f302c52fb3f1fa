"""The time of a search over lanes: who may wait for a compiler, and what is not begun any more."""

from __future__ import annotations

import dataclasses

import pytest

from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.measure.entry import Verdict
from ampopt.search.lane_search import OPENING
from ampopt.search.openings import Opening
from ampopt.search.pass_manager import PassManager
from ampopt.search.trial import Trial
from tests.search.test_search_plan import found
from tests.support.planted import Compiler, Planted


@dataclasses.dataclass(frozen=True)
class Lengthy(Compiler):
    """A compiler that expects to take so many seconds."""

    seconds: float

    def expected_seconds(self, program: Program) -> float:
        return self.seconds


@pytest.mark.parametrize(("bound", "verdict_first"), [(1e-9, Verdict.KEPT), (None, Verdict.NOT_TRIED)])
def test_where_all_other_lanes_are_too_inexact_the_openings_engine_has_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch, bound: float | None, verdict_first: Verdict
) -> None:
    """Half of the search's time: more than an opening's share beside a lane that may win."""
    engine, end, order = Lengthy(500.0), PassManager.end, list[tuple[str, str, Verdict]]()

    def noted(manager: PassManager, trial: Trial, verdict: Verdict, reason: str) -> None:
        order.append((trial.entry.lane, trial.entry.name, verdict))
        end(manager, trial, verdict, reason)

    monkeypatch.setattr(
        "ampopt.search.lane_search.opening_of", lambda *_: Opening(("one", "two"), engine.name)
    )
    monkeypatch.setattr(PassManager, "end", noted)
    found(
        monkeypatch,
        Pipeline((Planted("one"), Planted("two")), (engine,)),
        after_openings={"fp32": 1.0, "amp": 1.0},
        bound=bound,
        seconds_left=1000.0,
        cost=lambda names: 0.5 ** len(names),
    )
    before = order[: [lane for lane, _, _ in order].index("amp")]
    assert [verdict for _, name, verdict in before if name == engine.name] == [verdict_first]


@pytest.mark.parametrize(("judging_s", "lanes"), [(0.0, {"fp32", "amp"}), (600.0, {"fp32"})])
def test_a_second_opening_that_would_take_the_last_comparison_s_time_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, judging_s: float, lanes: set[str]
) -> None:
    monkeypatch.setattr("ampopt.search.lane_search.opening_of", lambda *_: Opening(("one", "two")))
    monkeypatch.setattr(PassManager, "judging_s", lambda *_: judging_s)
    pipeline, after = Pipeline((Planted("one"), Planted("two"))), {"fp32": 1.0, "amp": 1.0}
    bench, _ = found(
        monkeypatch, pipeline, after_openings=after, seconds_left=500.0, cost=lambda names: 0.5 ** len(names)
    )
    tried = [row for row in bench.ledger.entries if row.verdict is not Verdict.NOT_TRIED]
    assert {row.lane for row in tried if row.name == OPENING} == lanes


def test_an_engine_that_the_opening_had_no_time_for_comes_before_the_rewrites_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Lengthy(500.0)
    monkeypatch.setattr("ampopt.search.lane_search.opening_of", lambda *_: Opening(("one",), engine.name))
    after, pipeline = {"fp32": 1.0, "amp": 2.0}, Pipeline((Planted("one"), Planted("two")), (engine,))
    bench, _ = found(
        monkeypatch, pipeline, after_openings=after, seconds_left=1000.0, cost=lambda names: 0.5 ** len(names)
    )
    names = [row.name for row in bench.ledger.entries if row.lane == "fp32"]
    assert names.index(engine.name) < names.index("two")
