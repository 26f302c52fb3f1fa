"""Few rounds at first, and more where the interval is wide; no rounds that would end too late."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from ampopt.ir.lanes import FP32
from ampopt.measure.headline import LEAST
from ampopt.search.pair_timer import LEAST_AGAIN, PairTimer, Timed
from ampopt.search.program_store import Built
from tests.helpers import program_of
from tests.support.comparing import CPU, Machine, Toy


class Timing:
    """A timer over a made-up machine, with programs a, b and c."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, call_s: float, *, deadline: float = 1000.0, noise: float = 0.01
    ) -> None:
        self.machine = Machine(monkeypatch, lambda names: call_s, noise)
        self.timer = PairTimer(CPU, deadline, self.machine.paused, self.machine.now)
        program = program_of(nn.ReLU(), torch.ones(2))
        self.a, self.b, self.c = (
            Built(FP32, program.replace(recipe=(Toy(name),)), (name,), call_s) for name in "abc"
        )

    def rounds(self, pair: Timed) -> int:
        """The rounds that a pair has."""
        told = self.timer.told(pair)
        return len(told.after.samples) if told is not None else 0


@pytest.mark.parametrize("call_s", [0.05, 0.3, 2.0])
def test_the_first_rounds_are_few_and_take_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, call_s: float
) -> None:
    timing = Timing(monkeypatch, call_s)
    pairs: Sequence[Timed] = [(timing.a, timing.b), (timing.a, timing.c)]
    expected = timing.timer.first_s(pairs)
    timing.timer.time(pairs)
    assert [timing.rounds(pair) for pair in pairs] == [LEAST, LEAST]
    assert timing.machine.time == pytest.approx(expected, rel=0.05)
    assert timing.machine.calls == {"fp32: a": 2 * LEAST, "fp32: b": LEAST, "fp32: c": LEAST}


def test_short_calls_have_more_first_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, 0.001)
    timing.timer.time([(timing.a, timing.b)])
    assert timing.rounds((timing.a, timing.b)) > 4 * LEAST
    assert timing.machine.time < 0.3


def test_the_widest_interval_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, 0.08, deadline=5.0)
    timing.machine.noises = {"c": 0.5}
    wide, narrow = (timing.b, timing.c), (timing.a, timing.b)
    timing.timer.time([narrow])
    timing.timer.time([wide])
    before = timing.machine.time
    assert timing.timer.refine([narrow, wide])
    assert timing.rounds(wide) > LEAST
    assert timing.rounds(narrow) == LEAST
    assert before < timing.machine.time <= 5.1


def test_pairs_with_the_same_first_program_share_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, 0.02, noise=0.3)
    pairs = [(timing.a, timing.b), (timing.a, timing.c)]
    timing.timer.time(pairs)
    calls = timing.machine.calls["fp32: a"]
    assert timing.timer.refine(pairs)
    assert timing.rounds(pairs[0]) == timing.rounds(pairs[1]) >= LEAST + LEAST_AGAIN
    assert timing.machine.calls["fp32: a"] - calls == 2 * (timing.rounds(pairs[0]) - LEAST)


def test_nothing_is_refined_once_the_intervals_are_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, 0.001)
    pairs = [(timing.a, timing.b)]
    timing.timer.time(pairs)
    while timing.timer.refine(pairs):
        pass
    told = timing.timer.told(pairs[0])
    assert told is not None
    assert told.is_enough
    assert timing.machine.time < 5.0


def test_nothing_is_refined_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, 0.1, deadline=2.4, noise=0.3)
    pairs = [(timing.a, timing.b)]
    timing.timer.time(pairs)
    assert 1.9 < timing.machine.time < 2.4
    calls = dict(timing.machine.calls)
    assert not timing.timer.refine(pairs)
    assert timing.machine.calls == calls


def test_pairs_that_were_not_timed_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, 0.01)
    assert timing.timer.told((timing.a, timing.b)) is None
    assert not timing.timer.refine([(timing.a, timing.b)])


def test_the_time_of_a_call_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, 0.05)
    timing.b.call_s = 7.0
    timing.timer.time([(timing.a, timing.b)])
    assert timing.b.call_s == pytest.approx(0.05, rel=0.05)
