"""The time budget holds for everything: for capturing and verifying a slow model, too."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.capture import Captured, capture
from ampopt.measure.entry import ORIGINAL
from ampopt.system.budget import COSTLY_CALL_S, COSTLY_PART, MARGIN_S, WHOLE, Budget, Finish, finish_of
from tests.support.planted import optimize

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Clock:
    """A clock that only sleeping moves on, and every look at it by a microsecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", self.look)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def look(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("call_s", "is_part", "finish"),
    [(0.01, True, WHOLE), (10.0, False, WHOLE), (COSTLY_CALL_S, True, COSTLY_PART)],
)
def test_only_parts_whose_calls_are_costly_are_compared_briefly(
    call_s: float, is_part: bool, finish: Finish
) -> None:
    assert finish_of(call_s, is_part=is_part) is finish


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Slow(nn.Module):
    """A call of it takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, then compute."""
        time.sleep(self.seconds)
        out: Tensor = self.linear(x)
        return out


class SlowAndBranching(nn.Module):
    """Slow parts in what is no single graph."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first, self.second = Slow(seconds / 2), Slow(seconds / 2)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """The second part is for sums over -100 only."""
        y: Tensor = self.first(x)
        return self.second(y) if y.sum() > -100 else y


@pytest.mark.parametrize("make", [Slow, SlowAndBranching])
@pytest.mark.parametrize(
    ("call_s", "budget_s"), [(100.0, 5.0), (4.0, 5.0), (1.0, 60.0), (0.5, 60.0), (0.1, 10.0), (0.03, 3.0)]
)
def test_nothing_takes_much_longer_than_the_budget_and_one_call(
    make: Any, call_s: float, budget_s: float, clock: Clock
) -> None:
    model, began = make(call_s), clock.now
    fast = optimize(model, X, budget_s=budget_s, cache=False)
    assert clock.now - began <= budget_s + call_s + 5.0, fast.report.notes
    with torch.no_grad():
        assert torch.allclose(fast(X), model(X), atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("clock")
def test_where_nothing_fits_it_is_said_with_a_budget_that_does() -> None:
    report = optimize(Slow(4.0), X, budget_s=5.0, precision="fp32", cache=False).report
    assert report.chosen == ORIGINAL
    assert report.entries == []
    assert report.notes[0].startswith(
        "a call takes 4 s here, so that capturing and judging one pass takes about "
    )
    assert report.notes[1] == "the original answers every call: nothing was tried"
    enough = float(report.notes[0].partition("give budget_s=")[2])
    again = optimize(Slow(4.0), X, budget_s=enough, precision="fp32", cache=False).report
    assert [entry.lane for entry in again.entries][:1] == ["fp32"]
    assert again.verified


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("call_s", "budget_s"), [(0.1, 60), (0.2, 120), (0.9, 540), (3.0, 600)])
def test_without_a_budget_a_slow_model_gets_the_time_of_its_calls(call_s: float, budget_s: int) -> None:
    report = optimize(Slow(call_s), X, budget_s=None, precision="fp32", cache=False).report
    told = [note for note in report.notes if note.startswith(f"the time budget was {budget_s} s, because a ")]
    assert len(told) == (budget_s > 60)
    assert [entry.lane for entry in report.entries][:1] == ["fp32"]
    assert report.verified


@pytest.mark.parametrize(
    ("capture_s", "given", "budget_s"), [(8.0, None, 60), (14.0, None, 84), (90.0, None, 120), (14.0, 60, 60)]
)
def test_a_model_that_takes_long_to_capture_gets_more_time(
    capture_s: float, given: float | None, budget_s: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*args: Any) -> Captured:
        clock.now += capture_s
        return capture(*args)

    began = clock.now
    monkeypatch.setattr("ampopt.api.capture", slowly)
    report = optimize(Slow(0.001), X, budget_s=given, precision="fp32", cache=False).report
    told = f"the time budget was {budget_s} s, because its capture took long: budget_s sets another"
    assert (told in report.notes) == (budget_s > 60)
    assert report.verified
    assert clock.now - began < max(budget_s, capture_s) + 5.0


def test_without_a_budget_nothing_takes_longer_than_ten_minutes(clock: Clock) -> None:
    began = clock.now
    report = optimize(Slow(10.0), X, budget_s=None, precision="fp32", cache=False).report
    assert report.notes[0].startswith("the time budget was 600 s, because a call takes 10 s here")
    assert report.notes[1].startswith("a call takes 10 s here, so that capturing and judging one pass takes ")
    assert report.chosen == ORIGINAL
    assert clock.now - began < 100.0


@pytest.mark.usefixtures("clock")
def test_fewer_random_inputs_are_drawn_where_a_call_takes_long() -> None:
    report = optimize(Slow(1.0), X, budget_s=91.0, precision="fp32", cache=False).report
    assert "verified on 0 of 2 random inputs, because a call takes 1 s here" in report.notes
    assert report.verified


@pytest.mark.usefixtures("clock")
def test_a_slow_first_call_alone_is_no_slow_model() -> None:
    class SlowAtFirst(Slow):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            SlowAtFirst.calls += 1
            self.seconds = 0.5 if SlowAtFirst.calls == 1 else 0.0
            return super().forward(x)

    report = optimize(SlowAtFirst(0.0), X, budget_s=10.0, precision="fp32", cache=False).report
    assert report.entries or report.regions or "not one graph" in report.notes[0]
    assert not any(note.startswith("a call takes") for note in report.notes)


def test_the_margin_is_not_told_as_time_that_is_left(clock: Clock) -> None:
    budget = Budget(clock.now, 2.0)
    assert budget.why_not(2.0 + MARGIN_S / 2, 0.1, "it") is None
    clock.sleep(1.5)
    reason = budget.why_not(50.0, 1.0, "it")
    assert reason == (
        "a call takes 1 s here, so that it takes about 50 s, and 0.5 s of the time budget are left: "
        "give budget_s=52"
    )
