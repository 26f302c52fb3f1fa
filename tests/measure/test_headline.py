"""Comparisons on made-up machines: what is the same is never found to differ, and no gain is overstated."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from ampopt.measure.headline import (
    ENOUGH,
    LEAST,
    MOST,
    NARROW,
    Compared,
    Load,
    compare_fairly,
    compare_to_decide,
    load_now,
    sure_gain,
    told_within,
)
from ampopt.measure.sampling import Gain, Measurement

SESSIONS = 100


class Machine:
    """A clock of its own, which every call moves on by what the machine makes of it."""

    def __init__(self, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0

    def seconds(self, work: float) -> float:
        """What a call takes that would take `work` by itself."""
        return work * self.random.lognormvariate(0, 0.01)

    def sampler(self, work: float) -> Callable[[], float]:
        """Samples calls of a program."""

        def sample() -> float:
            took = self.seconds(work)
            self.now += took
            return took

        return sample


class Noisy(Machine):
    """Every call takes half as long again, or two thirds, at random."""

    def seconds(self, work: float) -> float:
        return work * self.random.lognormvariate(0, 0.5)


class HeavyTailed(Machine):
    """Some calls stall, for any time."""

    def seconds(self, work: float) -> float:
        stall = self.random.paretovariate(0.8) if self.random.random() < 0.3 else 0.0
        return work * (1 + 0.02 * self.random.random() + stall)


class Bursts(Machine):
    """Something else runs for many calls, and then does not."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_burst = False

    def seconds(self, work: float) -> float:
        self.is_burst ^= self.random.random() < 0.02
        return super().seconds(work) * (self.random.uniform(1.5, 12) if self.is_burst else 1)


class Preempting(Machine):
    """Others get their turn every few milliseconds: longer calls are interrupted more often."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.left = self.random.uniform(0, 3e-3)

    def seconds(self, work: float) -> float:
        took = 0.0
        while work > self.left:
            took, work = took + self.left + self.random.uniform(5e-3, 20e-3), work - self.left
            self.left = self.random.uniform(2e-3, 4e-3)
        self.left -= work
        return took + work


class Drifting(Machine):
    """It gets slower and slower, as a processor that grows hot."""

    def seconds(self, work: float) -> float:
        return super().seconds(work) * (1 + 20 * self.now)


MACHINES = [Machine, Noisy, HeavyTailed, Bursts, Preempting, Drifting]


def compared(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, before_s: float, after_s: float, seconds: float = 1.0
) -> Compared:
    """Compare two programs on a machine, by its clock."""
    monkeypatch.setattr("ampopt.measure.sampling.time.perf_counter", lambda: machine.now)
    return compare_fairly(machine.sampler(before_s), machine.sampler(after_s), seconds=seconds)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("work", [1e-3, 20e-3])
def test_identical_programs_are_no_different_however_busy_the_machine(
    monkeypatch: pytest.MonkeyPatch, machine: type[Machine], work: float, seconds: float
) -> None:
    found = [compared(monkeypatch, machine(seed), work, work, seconds).gain for seed in range(SESSIONS)]
    assert sum(each.is_real or each.is_loss for each in found) <= SESSIONS // 100


@pytest.mark.parametrize("machine", MACHINES)
def test_few_rounds_of_costly_calls_find_no_gain_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, machine: type[Machine]
) -> None:
    found = list[Compared]()
    for seed in range(SESSIONS):
        each = machine(seed)
        monkeypatch.setattr("ampopt.measure.sampling.time.perf_counter", lambda each=each: each.now)
        found.append(compare_to_decide(each.sampler(1.0), each.sampler(1.0), seconds=1.0))
    assert sum(each.gain.is_real for each in found) <= SESSIONS // 100


@pytest.mark.parametrize(
    ("compare", "before_s", "rounds"),
    [
        (compare_to_decide, 2.0, 3),
        (compare_to_decide, 1.1, LEAST),
        (compare_to_decide, 0.9, 3),
        (compare_fairly, 2.0, LEAST),
        (compare_fairly, 0.9, LEAST),
    ],
)
def test_few_rounds_of_costly_calls_decide_and_more_are_reported(
    compare: Callable[..., Compared], before_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(0)
    monkeypatch.setattr("ampopt.measure.sampling.time.perf_counter", lambda: machine.now)
    found = compare(machine.sampler(before_s), machine.sampler(1.0), seconds=1.0)
    assert found.gain.is_real == (before_s > 1)
    assert len(found.after.samples) == rounds


@pytest.mark.parametrize("factor", [1.02, 2.0, 3.0])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("work", [1e-3, 20e-3])
def test_a_gain_is_told_as_no_more_than_it_is(
    monkeypatch: pytest.MonkeyPatch, machine: type[Machine], work: float, factor: float
) -> None:
    found = [compared(monkeypatch, machine(seed), factor * work, work).gain for seed in range(SESSIONS)]
    assert sum(each.at_least > factor for each in found) <= SESSIONS // 100


@pytest.mark.parametrize("machine", [Machine, Drifting, Bursts])
def test_a_gain_is_told_as_nearly_what_it_is_where_that_can_be_found_out(
    monkeypatch: pytest.MonkeyPatch, machine: type[Machine]
) -> None:
    found = [compared(monkeypatch, machine(seed), 2e-3, 1e-3, 10.0).gain for seed in range(SESSIONS)]
    assert sum(each.at_least > 1.75 for each in found) >= 0.95 * SESSIONS


def test_a_median_that_an_interrupted_call_makes_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [compared(monkeypatch, Preempting(seed), 3e-3, 1e-3).gain for seed in range(SESSIONS)]
    assert sum(each.ratio > 4 for each in found) > SESSIONS / 2, "a machine on which medians mislead"
    assert max(each.at_least for each in found) <= 3


def test_a_quiet_machine_is_asked_no_longer_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(monkeypatch, Machine(0), 2e-3, 1e-3, seconds=100.0)
    assert ENOUGH <= len(found.before.samples) == len(found.after.samples) < 2 * ENOUGH
    assert found.gain.high <= NARROW * found.gain.low


def test_sampling_goes_on_until_the_interval_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(monkeypatch, Bursts(0), 2e-3, 1e-3, seconds=100.0)
    assert 2 * ENOUGH < len(found.before.samples) < MOST
    assert found.gain.high <= NARROW * found.gain.low


def test_sampling_ends_with_the_time_or_after_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = compared(monkeypatch, Noisy(0), 1.0, 1.0, seconds=60.0)
    assert LEAST < len(spent.before.samples) < 30
    assert spent.gain.high > NARROW * spent.gain.low
    assert len(compared(monkeypatch, Noisy(0), 1e-3, 1e-3, seconds=1e6).before.samples) == MOST
    assert len(compared(monkeypatch, Noisy(0), 1.0, 1.0, seconds=0.0).before.samples) == LEAST


def test_what_the_control_differs_by_is_taken_off_either_end() -> None:
    before, after = Measurement((2.0,) * 20), Measurement((1.0,) * 20)
    for control in (Gain(1.0, 0.8, 1.1), Gain(1.0, 0.9, 1.25), Gain(1.2, 1.1, 1.25)):
        found = sure_gain(before, after, control)
        assert (found.ratio, found.low, found.high) == pytest.approx((2.0, 1.6, 2.5))


def test_the_means_must_say_so_too() -> None:
    before = Measurement((1.0,) * 80 + (0.1,) * 20)
    after = Measurement((0.5,) * 80 + (5.0,) * 20)
    found = sure_gain(before, after, Gain(1.0, 1.0, 1.0))
    assert found.ratio == 2.0
    assert found.low < 1 < found.high
    assert found.is_vague


def test_the_load_is_that_of_the_machine_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def without() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (11.237, 1.0, 1.0), raising=False)
    assert load_now() == Load(11.24, 2)
    assert str(load_now()) == "load average 11.2 on 2 cores"
    monkeypatch.setattr(os, "getloadavg", without)
    assert load_now() is None
    monkeypatch.delattr(os, "getloadavg")
    assert load_now() is None


@pytest.mark.parametrize(("average", "is_high"), [(0.1, False), (2.0, False), (2.5, True), (11.0, True)])
def test_a_load_is_high_where_more_was_to_run_than_there_are_cores(average: float, is_high: bool) -> None:
    assert Load(average, 2).is_high is is_high


def test_more_rounds_than_there_is_time_for_are_not_begun() -> None:
    """The width of an interval shrinks with the square root of the rounds: then it tells what is in reach."""
    out_of_reach, narrow = Gain(2.0, 1.0, 4.0), Gain(2.0, 1.99, 2.01)
    is_told = told_within(seconds=3600.0)
    assert not is_told(MOST, [out_of_reach])
    assert is_told(ENOUGH, [narrow, narrow])
    assert not is_told(ENOUGH, [narrow, out_of_reach])
    hopeless = told_within(seconds=0.0)
    assert not hopeless(ENOUGH - 1, [narrow, out_of_reach])
    assert hopeless(ENOUGH, [narrow, out_of_reach])
