"""Measurements: their quantiles, gains with their intervals, and samples taken in turn."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping

import pytest

from ampopt.measure import sampling
from ampopt.measure.sampling import Gain, Measurement, gain, interleave, latency, tells_soon


def test_quantiles_are_samples() -> None:
    m = Measurement(tuple(float(i) for i in range(100, 0, -1)))
    assert [m.quantile(q) for q in (0.0, 0.01, 0.5, 0.9, 0.99)] == [1, 1, 50, 90, 99]
    assert m.median == 50.5


@pytest.mark.parametrize(
    ("n", "known"), [(1, []), (2, [0.5]), (6, [0.5]), (9, [0.5]), (10, [0.5, 0.9]), (99, [0.5, 0.9]),
                     (100, [0.5, 0.9, 0.99])],
)  # fmt: skip
def test_a_quantile_is_known_where_a_sample_lies_beyond_it(n: int, known: list[float]) -> None:
    m = Measurement(tuple(float(i) for i in range(n)))
    assert [q for q in (0.5, 0.9, 0.99, 1.0) if m.quantile(q) is not None] == known


def test_a_trimmed_mean_leaves_out_both_ends() -> None:
    m = Measurement((1000.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 0.0))
    assert m.trimmed_mean(0.1) == 4.5
    assert m.trimmed_mean(0.0) == 103.6
    assert Measurement((3.0,)).trimmed_mean(0.1) == 3.0


def test_the_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert Measurement((1.0, 2.0, 3.0, 4.0)).spread == pytest.approx((3 - 1) / 2 / 2.5)
    assert Measurement((2.0,) * 5).spread == 0


def test_a_measurement_is_json_in_milliseconds() -> None:
    assert json.loads(json.dumps(Measurement((0.001, 0.002, 0.003)).to_dict())) == {
        "p50_ms": 2.0,
        "p90_ms": None,
        "p99_ms": None,
        "spread": 0.5,
        "samples": 3,
    }


@pytest.mark.parametrize(
    ("ratio", "low", "high", "is_real", "is_loss"),
    [
        (1.2, 1.1, 1.3, True, False),
        (1.2, 0.9, 1.3, False, False),
        (1.004, 1.001, 1.006, False, False),
        (1.005, 1.001, 1.006, True, False),
        (0.8, 0.7, 0.9, False, True),
        (0.8, 0.7, 1.1, False, False),
        (0.996, 0.99, 0.999, False, False),
        (1.0, 1.0, 1.0, False, False),
    ],
)
def test_only_what_is_outside_the_noise_and_half_a_percent_counts(
    ratio: float, low: float, high: float, is_real: bool, is_loss: bool
) -> None:
    found = Gain(ratio, low, high)
    assert (found.is_real, found.is_loss) == (is_real, is_loss)


@pytest.mark.parametrize(
    ("found", "at_least", "is_vague"),
    [
        (Gain(2.1, 1.9, 2.3), 1.9, False),
        (Gain(2.1, 1.999, 2.3), 1.99, False),
        (Gain(1.01, 1.004, 1.02), 1.0, False),
        (Gain(1.2, 0.99, 1.3), 1.0, False),
        (Gain(0.5, 0.4, 0.55), 1.0, False),
        (Gain(2.0, 1.3, 2.0), 1.0, True),
        (Gain(1.0, 0.0, 6.0), 1.0, True),
    ],
)
def test_only_the_lower_end_of_a_narrow_interval_is_claimed(
    found: Gain, at_least: float, is_vague: bool
) -> None:
    assert (found.at_least, found.is_vague) == (at_least, is_vague)


def test_a_gain_is_the_median_of_paired_ratios() -> None:
    before, after = Measurement((2.0, 4.0, 6.0)), Measurement((1.0, 1.0, 1.0))
    assert gain(before, after) == Gain(4.0, 2.0, 6.0)
    assert gain(after, before).ratio == 0.25
    with pytest.raises(ValueError, match="shorter"):
        gain(before, Measurement((1.0,)))


def test_drift_that_both_share_is_no_gain() -> None:
    drifting = tuple(1.0 + 0.1 * i for i in range(20))
    assert gain(Measurement(drifting), Measurement(drifting)) == Gain(1.0, 1.0, 1.0)


@pytest.mark.parametrize("n", [6, 8, 20, 100])
def test_the_interval_holds_the_median_in_95_of_100_cases(n: int) -> None:
    random.seed(n)
    held, trials = 0, 2000
    for _ in range(trials):
        before = Measurement(tuple(random.lognormvariate(0, 0.3) for _ in range(n)))
        held += (found := gain(before, Measurement((1.0,) * n))).low <= 1.0 <= found.high
    assert held / trials >= 0.94


def test_samples_are_taken_in_turn_after_one_that_does_not_count() -> None:
    order: list[str] = []

    def sampler(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or float(len(order))  # type: ignore[func-returns-value]

    found = interleave({name: sampler(name) for name in "abc"}, seconds=0.0, least=2)
    first, second = order[3:6], order[6:]
    assert order[:3] == ["a", "b", "c"]
    assert sorted(first) == ["a", "b", "c"]
    assert second == first[::-1]
    for name in "abc":
        assert found[name].samples == (4.0 + first.index(name), 7.0 + second.index(name))


@pytest.mark.parametrize("names", ["ab", "abc", "ba"])
@pytest.mark.parametrize("seed", range(5))
def test_a_place_in_the_round_is_no_gain(names: str, seed: int) -> None:
    """The first of a round is slower by a percent: a fixed order took the second for faster, 1.01x."""
    taken, jitter = itertools.count(), random.Random(seed)

    def sample() -> float:
        return (1.01 if next(taken) % len(names) == 0 else 1.0) * jitter.gauss(1, 0.001)

    found = interleave(dict.fromkeys(names, sample), seconds=1e6, most=100, warm_up=False, seed=seed)
    gains = [gain(found["a"], found[name]) for name in names if name != "a"]
    assert all(abs(each.ratio - 1) < 0.005 for each in gains)
    assert not any(each.is_told for each in gains)


def test_what_has_just_run_needs_no_sample_that_does_not_count() -> None:
    taken: list[int] = []

    def sampler() -> float:
        taken.append(1)
        return 1.0

    found = interleave({"a": sampler}, seconds=0.0, least=2, warm_up=False)
    assert len(found["a"].samples) == len(taken) == 2


@pytest.mark.parametrize(("last_s", "calls"), [(0.0, 2), (sampling.LONG_CALL_S, 1)])
def test_a_call_that_was_long_is_timed_without_another_before_it(last_s: float, calls: int) -> None:
    made: list[int] = []
    latency(lambda: made.append(1), last_s=last_s)()
    assert len(made) == calls


@pytest.mark.parametrize(
    ("settle_s", "last_s", "calls"), [(0.0, 0.0, 2), (5.0, 0.0, 6), (99.0, 0.0, 9), (5.0, 9.0, 1)]
)
def test_a_call_settles_before_it_is_timed(
    settle_s: float, last_s: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, made = 0.0, 0

    def call() -> None:
        nonlocal now, made
        now, made = now + 1.0, made + 1

    monkeypatch.setattr("ampopt.measure.sampling.time.perf_counter", lambda: now)
    seconds = latency(call, long_s=2.0, last_s=last_s, settle_s=settle_s)()
    assert (seconds, made) == (1.0, calls)


def test_rounds_end_with_the_time_or_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr("ampopt.measure.sampling.time.perf_counter", tick)
    assert len(interleave({"a": lambda: 1.0}, seconds=10.0, least=2)["a"].samples) in (9, 10, 11)
    assert len(interleave({"a": lambda: 1.0}, seconds=1e6, most=7)["a"].samples) == 7


@pytest.mark.parametrize(("enough", "rounds"), [(1, 3), (4, 4), (5, 6), (7, 9), (10, 13), (1000, 30)])
def test_rounds_end_when_they_are_enough(enough: int, rounds: int) -> None:
    def until(timed: Mapping[str, Measurement]) -> bool:
        assert set(timed) == {"a", "b"}
        return len(timed["a"].samples) >= enough

    samplers = {name: lambda: 1.0 for name in "ab"}
    found = interleave(samplers, seconds=1e6, least=6, most=30, until=until)
    assert [len(each.samples) for each in found.values()] == [rounds, rounds]


@pytest.mark.parametrize(
    ("before", "after", "is_told"),
    [
        ((2.0, 2.0, 2.0), (1.0, 1.5, 1.2), True),
        ((2.0, 2.0, 2.0), (1.0, 1.7, 1.2), False),  # 1.18x in one round
        ((1.0, 1.0, 1.0), (1.3, 1.9, 1.4), True),
        ((1.0, 1.0, 1.0), (1.3, 1.9, 1.2), False),
        ((2.0, 2.0), (1.0, 1.0), False),
        ((0.6, 0.6, 0.6), (0.4, 0.4, 0.4), False),  # these calls are not costly
    ],
)
def test_three_rounds_of_costly_calls_tell_what_is_plain(
    before: tuple[float, ...], after: tuple[float, ...], is_told: bool
) -> None:
    assert tells_soon(Measurement(before), Measurement(after)) == is_told


@pytest.mark.parametrize(
    ("n", "miss", "ends"), [(6, 0.05, (1, 6)), (5, 0.05, (1, 5)), (20, 0.05, (6, 15)), (20, 0.02, (5, 16))]
)
def test_the_interval_of_a_median_is_that_of_the_tables(n: int, miss: float, ends: tuple[int, int]) -> None:
    """Conover's table: of 20 samples the 6th and the 15th hold the median with 95.9 %."""
    assert Measurement(tuple(map(float, range(1, n + 1)))).interval_of_median(miss) == ends


@pytest.mark.parametrize("n", [1000, 1029, 1030, 1075, 20_000])
def test_many_samples_have_an_interval_too(n: int) -> None:
    """The ranks' distribution is then normal: 1.96 of its standard deviations, sqrt(n) / 2."""
    low, high = Measurement(tuple(map(float, range(n)))).interval_of_median(0.05)
    assert low == pytest.approx(n / 2 - 0.98 * math.sqrt(n), abs=2)
    assert high == n - 1 - low
    after = Measurement((1.0,) * n)
    told = gain(Measurement(tuple(1.0 + place / n for place in range(n))), after)
    assert told.low == pytest.approx(1.0 + low / n)
