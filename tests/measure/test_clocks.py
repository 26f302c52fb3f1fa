"""Samplers: what they time, and what goes before it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from ampopt.measure import clocks as measure
from ampopt.measure.clocks import REST_S, engine_latency, engine_long_s, latency, seconds_once_loaded


def test_a_quick_call_is_timed_after_an_untimed_one_and_a_long_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, calls, step = 0.0, 0, 0.001

    def call() -> None:
        nonlocal now, calls
        now, calls = now + step, calls + 1

    monkeypatch.setattr("ampopt.measure.sampling.time.perf_counter", lambda: now)
    sample = latency(call, torch.device("cpu"))
    assert [round(sample(), 6) for _ in range(2)] == [0.001, 0.001]
    assert calls == 4
    step, calls = 1.0, 0
    sample()
    calls = 0
    assert sample() == 1.0
    assert calls == 1


def test_a_call_that_is_known_to_be_long_is_timed_at_once() -> None:
    calls: list[int] = []
    engine_latency(lambda: calls.append(1), torch.device("cpu"), last_s=engine_long_s(torch.device("cpu")))()
    assert calls == [1]
    engine_latency(lambda: calls.append(1), torch.device("cpu"), last_s=0.02)()
    assert calls == [1, 1, 1]


def test_a_call_in_an_engines_own_threads_begins_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr("ampopt.measure.sampling.time.sleep", done.append)
    cpu = torch.device("cpu")
    for rest, last, expected in (
        (0.02, 0.0, [0.02, "call", "call"]),
        (0.0, 0.0, ["call", "call"]),
        (0.0, engine_long_s(cpu), [REST_S, "call"]),
        (0.3, engine_long_s(cpu), [0.3, "call"]),
    ):
        done.clear()
        engine_latency(lambda: done.append("call"), cpu, rest_s=rest, last_s=last)()
        assert done == expected


def test_a_cpu_has_no_peak_memory() -> None:
    assert measure.peak_memory(lambda: None, torch.device("cpu")) is None


def pausing(*pauses: float) -> tuple[Callable[[], None], list[float]]:
    """A call that takes these seconds, one after the other, in operators of 0.05 s; and what is left."""
    left = list(pauses)

    def call() -> None:
        seconds = left.pop(0)
        for _ in range(max(1, round(seconds / 0.05))):
            torch.ones(1).add_(1)
            time.sleep(min(seconds, 0.05))

    return call, left


CPU = torch.device("cpu")


@pytest.mark.timing
def test_a_call_that_takes_too_long_is_given_up_at_its_next_operator() -> None:
    seconds_once_loaded(lambda: None, CPU, long_s=60.0, most_s=60.0, loading_s=60.0)  # loads the compiler
    began = time.perf_counter()
    call, left = pausing(5.0, 5.0, 5.0)
    assert seconds_once_loaded(call, CPU, long_s=0.01, most_s=0.12, loading_s=0.3) == math.inf
    assert time.perf_counter() - began < 4.0
    assert left == [5.0], "one call while it may load, and one more"


@pytest.mark.timing
def test_a_short_call_is_enough() -> None:
    call, left = pausing(0.05, 0.2)
    assert 0.05 <= seconds_once_loaded(call, CPU, long_s=10.0, most_s=10.0, loading_s=10.0) < 0.2
    assert left == [0.2]


@pytest.mark.timing
@pytest.mark.parametrize("loading", [(1.0,), (1.0, 0.5), (0.2, 0.1, 0.05)])
def test_calls_that_load_are_not_taken_for_slow_ones(loading: tuple[float, ...]) -> None:
    call, left = pausing(*loading, 0.0, 7.0)
    assert seconds_once_loaded(call, CPU, long_s=0.03, most_s=0.12, loading_s=3.0) < 0.03
    assert left == [7.0]


@pytest.mark.timing
def test_what_a_call_given_up_has_loaded_helps_the_next() -> None:
    call, _ = pausing(9.0, 0.0)
    assert seconds_once_loaded(call, CPU, long_s=0.03, most_s=0.12, loading_s=0.3) < 0.03


@pytest.mark.timing
def test_a_call_that_is_as_long_again_computes() -> None:
    call, left = pausing(0.3, 0.3, 0.0)
    assert 0.3 <= seconds_once_loaded(call, CPU, long_s=0.03, most_s=0.12, loading_s=3.0) < 0.5
    assert left == [0.0]


def test_what_fails_in_a_call_is_not_taken_for_slowness() -> None:
    def call() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        seconds_once_loaded(call, CPU, long_s=0.1, most_s=1.0, loading_s=1.0)
