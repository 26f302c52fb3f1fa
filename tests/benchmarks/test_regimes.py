"""Blocks of calls back to back and at 30 Hz, on a clock that only calls and sleeps move."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from benchmarks import regimes
from benchmarks.regimes import (
    AT_30_HZ,
    BACK_TO_BACK,
    BLOCK_S,
    FEWEST,
    FRAMES,
    LEAST_CALLS,
    PERIOD_S,
    REGIMES,
    Block,
    Subject,
    block,
    in_turn,
    speedup,
    summary,
)


@dataclasses.dataclass
class Clock:
    """In place of the module `time`."""

    now: float = 0.0
    slept: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 2 * (self.now - self.slept)  # two threads are busy while nobody sleeps

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(regimes, "time", clock)
    return clock


class Work:
    """A call that takes so long and notes when it began."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.begun = clock, seconds, list[float]()

    def __call__(self) -> None:
        self.begun.append(self.clock.now)
        self.clock.now += self.seconds


def test_calls_back_to_back_have_nothing_between_them(clock: Clock) -> None:
    work = Work(clock, 0.004)
    found = block(Subject(work), BACK_TO_BACK)
    gaps = [after - before for before, after in itertools.pairwise(work.begun)]
    assert gaps == pytest.approx([0.004] * len(gaps))
    assert clock.slept == 0
    assert found["seconds"] == pytest.approx([0.004] * round(BLOCK_S / 0.004), abs=1e-9)
    assert found["cpu_s"] == pytest.approx(0.008)
    assert "queued_s" not in found


@pytest.mark.parametrize(
    ("seconds", "calls", "frames"),
    [(0.05, LEAST_CALLS, FRAMES), (0.3, 4, 4), (0.6, FEWEST, FEWEST), (3.0, FEWEST, FEWEST)],
)
def test_long_calls_are_a_few(clock: Clock, seconds: float, calls: int, frames: int) -> None:
    for regime, wanted in ((BACK_TO_BACK, calls), (AT_30_HZ, frames)):
        work = Work(clock, seconds)
        found = block(Subject(work), regime)
        assert found["seconds"] == pytest.approx([seconds] * wanted)
        assert found["cpu_s"] == pytest.approx(2 * seconds)
        assert len(work.begun) == wanted + 1, "one that is not timed"


def test_waiting_for_the_device_counts_and_queued_calls_wait_once(clock: Clock) -> None:
    def wait() -> None:
        clock.now += 0.001

    found = block(Subject(Work(clock, 0.001), wait, queues=True), BACK_TO_BACK)
    assert found["seconds"][0] == pytest.approx(0.002)
    assert found["queued_s"] == pytest.approx(0.001 + 0.001 / round(BLOCK_S / 0.002), rel=0.02)


@pytest.mark.parametrize(("seconds", "ticks"), [(0.005, 1), (0.040, 2)])
def test_frames_begin_at_ticks_and_late_ones_wait_for_the_next(
    clock: Clock, seconds: float, ticks: int
) -> None:
    work = Work(clock, seconds)
    found = block(Subject(work), AT_30_HZ)
    assert found["seconds"] == pytest.approx([seconds] * FRAMES)
    assert len(work.begun) == FRAMES + 1, "one frame that is not timed"
    gaps = [after - before for before, after in itertools.pairwise(work.begun)]
    assert gaps == pytest.approx([ticks * PERIOD_S] * FRAMES)
    assert found["cpu_s"] == pytest.approx(2 * seconds)


def test_energy_is_a_frames_and_a_clock_is_as_it_was(clock: Clock) -> None:
    subject = Subject(Work(clock, 0.005), meter=lambda: {"energy_j": 90 * clock.now, "sm_mhz": 1500.0})
    found = summary([block(subject, AT_30_HZ)])
    assert found["energy_mj"] == pytest.approx(90e3 * PERIOD_S, rel=1e-6), "idle time is the frame's, too"
    assert found["sm_mhz"] == 1500
    assert found["samples"] == FRAMES
    assert summary([block(subject, BACK_TO_BACK)])["energy_mj"] == pytest.approx(90e3 * 0.005)


def turns(
    rounds: int, seconds: float, clock: Clock
) -> tuple[list[tuple[str, str]], dict[str, dict[str, list[Block]]]]:
    taken: list[tuple[str, str]] = []

    def block_of(name: str, regime: str) -> Block:
        taken.append((name, regime))
        clock.now += 1.0
        return {"seconds": [1.0]}

    names = ("a", "b", "c")
    found = in_turn(
        {name: lambda regime, name=name: block_of(name, regime) for name in names},  # type: ignore[misc]
        seconds=seconds,
        pause_s=0.5,
        rounds=rounds,
    )
    return taken, found


def test_everybody_has_a_block_in_every_round_in_another_order(clock: Clock) -> None:
    taken, found = turns(4, 0.0, clock)
    assert clock.slept == 0.5 * len(taken) == 0.5 * 4 * 2 * 3
    orders = set()
    for start in range(0, len(taken), 3):
        (regime,) = {regime for _, regime in taken[start : start + 3]}
        names = [name for name, _ in taken[start : start + 3]]
        assert sorted(names) == ["a", "b", "c"]
        assert regime == REGIMES[start // 3 % 2]
        orders.add(tuple(names))
    assert len(orders) > 1
    assert all(len(found[name][regime]) == 4 for name in "abc" for regime in REGIMES)


def test_rounds_go_on_until_the_time_is_over(clock: Clock) -> None:
    taken, _ = turns(1, 25.0, clock)
    assert len(taken) == 3 * 6, "a round takes nine seconds"


def test_the_speed_up_pairs_the_blocks_of_a_round() -> None:
    slow = summary([{"seconds": [2.0 * r, 2.0 * r, 9.0 * r]} for r in range(1, 8)])
    fast = summary([{"seconds": [1.0 * r] * 3} for r in range(1, 8)])
    found = speedup(slow, fast)
    assert (found.low, found.ratio, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert slow["blocks_ms"] == [2000.0 * r for r in range(1, 8)]
