"""Samplers: what they time, and what goes before it."""

from __future__ import annotations

import pytest
import torch

from ampopt import measure
from ampopt.measure import latency


def test_a_quick_call_is_timed_after_an_untimed_one_and_a_long_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, calls, step = 0.0, 0, 0.001

    def call() -> None:
        nonlocal now, calls
        now, calls = now + step, calls + 1

    monkeypatch.setattr("ampopt.sampling.time.perf_counter", lambda: now)
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
