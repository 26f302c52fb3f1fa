"""Programs sampled in the same rounds: gains of any two, and no difference where there is none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ampopt.measure.headline import ENOUGH, LEAST
from ampopt.measure.rounds import Batch, between, sample
from ampopt.measure.sampling import Measurement

SESSIONS = 100


def sampler(generator: random.Random, seconds: float, noise: float) -> Callable[[], float]:
    return lambda: seconds * generator.lognormvariate(0, noise)


def batch(seed: int, *, rounds: int, noise: float, **seconds: float) -> Batch:
    generator = random.Random(seed)
    samplers = {key: sampler(generator, value, noise) for key, value in seconds.items()}
    return sample(samplers, next(iter(seconds)), rounds=rounds, seconds=10.0, seed=seed)


def test_every_pair_has_its_gain() -> None:
    found = batch(0, rounds=40, noise=0.01, a=0.03, b=0.02, c=0.01)
    for before, after, factor in [("a", "b", 1.5), ("b", "c", 2.0), ("c", "a", 1 / 3)]:
        told = between([found], before, after)
        assert told is not None
        assert told.gain.ratio == pytest.approx(factor, rel=0.02)
        assert told.is_enough
        assert told.after.median == pytest.approx({"a": 0.03, "b": 0.02, "c": 0.01}[after], rel=0.02)


def test_the_first_program_is_sampled_twice_and_others_once() -> None:
    found = batch(0, rounds=8, noise=0.01, a=1.0, b=1.0)
    assert (found.twice, len(found.again.samples)) == ("a", 8)
    assert {key: len(times.samples) for key, times in found.times.items()} == {"a": 8, "b": 8}


def test_no_time_is_six_rounds_and_fewer_only_where_asked_for() -> None:
    def rounds(asked: int) -> int:
        samplers = {"a": lambda: 1.0}
        return len(sample(samplers, "a", rounds=asked, seconds=0.0, seed=0).again.samples)

    assert [rounds(100), rounds(3)] == [LEAST, 3]


def test_rounds_that_two_programs_share_are_joined() -> None:
    batches = [
        batch(0, rounds=6, noise=0.01, a=2.0, b=1.0),
        batch(1, rounds=6, noise=0.01, a=2.0, c=1.0),
        batch(2, rounds=30, noise=0.01, b=1.0, a=2.0),
    ]
    told = between(batches, "a", "b")
    assert told is not None
    assert len(told.after.samples) == 36
    assert between(batches, "b", "c") is None
    first = between(batches[:1], "a", "b")
    assert first is not None
    assert told.width < first.width
    assert not first.is_enough
    assert told.is_enough
    assert ENOUGH > 6


def test_what_a_program_differs_by_from_itself_widens_the_interval() -> None:
    steady = Batch({"a": Measurement((2.0,) * 6), "b": Measurement((1.0,) * 6)}, "a", Measurement((2.0,) * 6))
    shaky = Batch(steady.times, "a", Measurement((3.0,) * 6))
    told, widened = between([steady], "a", "b"), between([shaky], "a", "b")
    assert told is not None
    assert widened is not None
    assert (told.gain.low, told.gain.high) == (2.0, 2.0)
    assert (widened.gain.low, widened.gain.high) == pytest.approx((4 / 3, 3.0))


@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_equal_programs_are_hardly_ever_told_apart(noise: float) -> None:
    wrong = 0
    for seed in range(SESSIONS):
        parts = [
            batch(1000 * seed + part, rounds=8, noise=noise, a=0.02, b=0.02, c=0.02) for part in range(3)
        ]
        told = between(parts, "b", "c")
        assert told is not None
        wrong += told.gain.is_real or told.gain.is_loss
    assert wrong <= 2
