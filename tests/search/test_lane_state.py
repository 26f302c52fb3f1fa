"""The state of the search in one lane."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
