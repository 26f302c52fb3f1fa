"""What a device reaches at best is measured in about two seconds, once, and tells a least time."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from ampopt.diagnosis import ceilings
from ampopt.diagnosis.ceilings import Ceilings, ceilings_of, measure_ceilings
from tests.support.cases import CEILINGS, CPU


def test_ceilings_are_positive_and_tell_a_least_time() -> None:
    found = measure_ceilings(CPU, torch.bfloat16, seconds=0.1)
    assert found.rates.keys() == {"fp32", "bfloat16"}
    assert found.bandwidth > 1e8
    assert 1e-8 < found.launch_s < 1e-2
    least = CEILINGS.least_s(10**9, 10**6, 3, torch.bfloat16)
    assert least == {"compute": 5e-3, "memory": 1e-4, "launch": pytest.approx(3e-6)}


@pytest.mark.parametrize(("product_s", "sizes"), [(1e-3, [256, 1024]), (0.02, [256])])
def test_a_product_that_is_slow_is_not_measured_large(
    monkeypatch: pytest.MonkeyPatch, product_s: float, sizes: list[int]
) -> None:
    """As in bfloat16 without instructions for it: a large one took 3 s of "about two seconds"."""
    measured = []

    def best_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
        if isinstance(call, functools.partial) and call.func is torch.mm:
            measured.append(len(call.args[0]))
        return product_s

    monkeypatch.setattr(ceilings, "_best_s", best_s)
    measure_ceilings(CPU, torch.bfloat16)
    assert measured == 2 * sizes


def test_ceilings_are_measured_once_for_a_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[object]()

    def counted(*key: object) -> Ceilings:
        measured.append(key)
        return CEILINGS

    monkeypatch.setattr(ceilings, "measure_ceilings", counted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert ceilings_of(CPU, torch.bfloat16) is ceilings_of(CPU, torch.bfloat16) is CEILINGS
    assert measured == [(CPU, torch.bfloat16)]
