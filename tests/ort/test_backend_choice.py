"""Which backend serves a robot best, on made-up timings."""

from __future__ import annotations

import pytest

from ampopt.measure.sampling import Measurement
from ampopt.ort.backend_choice import Timed, best


def timed(p50: float, tail: float, threads: int = 1, samples: int = 200) -> Timed:
    """All samples at `p50` milliseconds but for the last fifth of them."""
    slow = samples // 5
    return Timed(Measurement((p50 / 1e3,) * (samples - slow) + (tail / 1e3,) * slow), threads)


@pytest.mark.parametrize(
    ("one", "other", "chosen"),
    [
        (timed(10, 11), timed(12, 13), "one"),  # faster in both
        (timed(10, 40), timed(12, 13), "other"),  # a little faster mostly, much slower now and then
        (timed(10, 16), timed(20, 21), "one"),  # a worse tail that is still the better one
        (timed(10, 24), timed(20, 21), "one"),  # twice as fast outweighs a tail of 8/7
        (timed(10, 11, 8), timed(10.5, 11.5, 1), "other"),  # as good, with seven threads less
        (timed(10, 11, 8), timed(15, 16, 1), "one"),  # not as good
        (timed(10, 11, 4), timed(10.5, 11, 4), "one"),
    ],
)
def test_median_tail_and_threads_decide(one: Timed, other: Timed, chosen: str) -> None:
    assert best({"one": one, "other": other}) == chosen
    assert best({"other": other, "one": one}) == chosen


def test_one_disturbance_is_no_tail_where_samples_are_few() -> None:
    quiet = Timed(Measurement((0.011,) * 50), 1)
    disturbed = Timed(Measurement((0.01,) * 49 + (1.0,)), 1)
    assert disturbed.tail == 0.01
    assert best({"quiet": quiet, "disturbed": disturbed}) == "disturbed"
    many = Timed(Measurement((0.01,) * 396 + (1.0,) * 8), 1)
    assert many.tail == 1.0


def test_a_handful_of_samples_has_no_tail() -> None:
    assert Timed(Measurement((0.01,) * 5 + (1.0,)), 1).tail == 0.01


def test_what_was_measured_is_told() -> None:
    assert str(timed(10, 40, 2)) == "median 10.000 ms, tail 40.000 ms, 2 threads"
    assert str(timed(10, 40)) == "median 10.000 ms, tail 40.000 ms, 1 thread"
