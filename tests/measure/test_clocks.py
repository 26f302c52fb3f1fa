"""Samplers: what they time, and what goes before it."""

from __future__ import annotations

import math
import time

import pytest
import torch

from ampopt.measure import clocks as measure
from ampopt.measure.clocks import latency, shortest_of_two


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


def test_a_cpu_has_no_peak_memory() -> None:
    assert measure.peak_memory(lambda: None, torch.device("cpu")) is None


def test_a_call_that_takes_too_long_is_given_up_at_its_next_operator() -> None:
    operators = 0

    def call() -> None:
        nonlocal operators
        for _ in range(100):
            torch.ones(1).add_(1)
            operators += 1
            time.sleep(0.05)

    assert shortest_of_two(call, torch.device("cpu"), long_s=0.01, most_s=0.12) == math.inf
    assert operators <= 6, "two calls, each of three operators and their pauses"


def test_the_better_of_two_long_calls_counts_and_one_short_call_is_enough() -> None:
    pauses = [0.2, 0.05]

    def call() -> None:
        time.sleep(pauses.pop(0))
        torch.ones(1)

    cpu = torch.device("cpu")
    assert 0.05 <= shortest_of_two(call, cpu, long_s=0.01, most_s=10.0) < 0.2
    pauses = [0.05, 0.2]
    assert 0.05 <= shortest_of_two(call, cpu, long_s=10.0, most_s=10.0) < 0.2
    assert pauses == [0.2]


def test_what_fails_in_a_call_is_not_taken_for_slowness() -> None:
    def call() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        shortest_of_two(call, torch.device("cpu"), long_s=0.1, most_s=1.0)
