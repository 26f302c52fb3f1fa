"""An engine that was hurried in its lane's opening is tried in full later."""

from __future__ import annotations

import dataclasses
import time

import pytest
from torch import nn

from ampopt.ir.pipeline import Pipeline
from ampopt.ir.transform import Engine, Family
from ampopt.search.openings import Opening
from tests.search.test_lane_search import KEPT, REVERTED, Rows, X, net, rows, search
from tests.support.planted import Bench, Planted

__all__ = ["net"]


@dataclasses.dataclass(frozen=True)
class Thorough(Planted, Engine):
    """Takes long, unless it is hurried."""

    family = Family.ENGINE

    def hurried(self) -> Engine:
        return dataclasses.replace(self, label="hurried", seconds=1.0)


@pytest.mark.parametrize(
    ("factor", "opened", "found"),
    [
        (1.0, [("thorough", KEPT)], ["thorough"]),
        (2.0, [("thorough", REVERTED)], []),
    ],
    ids=["right", "wrong"],
)
def test_an_engine_that_the_opening_had_little_time_for_is_tried_in_full(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, factor: float, opened: Rows, found: list[str]
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"hurried": 0.8, "thorough": 0.4}, seconds_left=1000.0)
    pipeline = Pipeline((), (Thorough("thorough", seconds=100.0, factor=factor),))
    lane = search(monkeypatch, bench, pipeline, Opening((), "thorough"))
    lane.open(time.perf_counter() + 50.0)
    assert rows(bench) == opened
    assert lane.engines.is_hurried == (factor == 1.0)
    assert bench.kept == (["hurried"] if found else [])
    lane.engines.run(bench.deadline)
    assert rows(bench)[1:] == ([("thorough, in full", KEPT)] if found else [])
    assert bench.kept == found
    assert not lane.engines.is_hurried


def test_an_engine_that_the_opening_had_the_time_for_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"thorough": 0.4}, seconds_left=1000.0)
    pipeline = Pipeline((), (Thorough("thorough", seconds=100.0),))
    lane = search(monkeypatch, bench, pipeline, Opening((), "thorough"))
    lane.open(time.perf_counter() + 500.0)
    lane.engines.run(bench.deadline)
    assert rows(bench) == [("thorough", KEPT)]
