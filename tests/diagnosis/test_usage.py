"""Clocks, power and energy of calls, and where launches are waited for by batch."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

import ampopt
from ampopt.diagnosis import case
from ampopt.diagnosis.sweep import BatchRow, crossings_told
from ampopt.diagnosis.usage import Usage, usage_of
from ampopt.measure.sampling import Measurement
from tests.support.cases import CPU, case_of


class Device:
    """A clock and a counter of energy, which moves every `tick_s`; a call takes 10 ms and uses 2 J."""

    def __init__(self, tick_s: float = 0.05) -> None:
        self.now, self.calls, self.tick_s = 0.0, 0, tick_s

    def call(self) -> None:
        self.now += 0.01
        self.calls += 1

    def read(self) -> dict[str, float]:
        ticks = int(self.now / self.tick_s + 1e-6)
        return {
            "sm_mhz": 1200.0,
            "memory_mhz": 3201.0,
            "power_w": 90.0,
            "energy_j": 200 * self.tick_s * ticks,
        }


def test_the_energy_of_a_call_is_between_two_ticks_of_the_counter() -> None:
    device = Device()
    found = usage_of(device.call, CPU, seconds=0.5, meter=device.read, clock=lambda: device.now)
    assert found is not None
    assert found.energy_j == pytest.approx(2.0)
    assert found.power_w == pytest.approx(200.0)
    assert (found.sm_mhz, found.memory_mhz) == (1200.0, 3201.0)
    assert 50 <= device.calls <= 65


def test_a_counter_that_stands_still_tells_no_energy() -> None:
    device = Device(tick_s=1e6)
    found = usage_of(device.call, CPU, seconds=0.1, meter=device.read, clock=lambda: device.now)
    assert found is not None
    assert (found.energy_j, found.power_w) == (None, 90.0)


def test_without_meters_nothing_is_run() -> None:
    device = Device()
    assert usage_of(device.call, CPU, meter=dict) is None
    assert device.calls == 0


def test_what_is_used_is_told_as_far_as_it_is_known() -> None:
    whole = Usage(1200.0, 3201.0, 143.4, 0.0573, 1980.0, ("its power limit",))
    assert str(whole) == "57.3 mJ a call, 143 W, 1200 MHz, memory 3201 MHz"
    assert whole.is_slowed
    assert whole.to_dict()["energy_mj"] == 57.3
    assert str(Usage(energy_j=0.5)) == "500 mJ a call"
    assert not Usage(energy_j=0.5).is_slowed


def test_a_diagnosis_tells_the_power_of_each_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Usage(1200.0, 3201.0, 143.4, 0.0573, 1980.0, ("its power limit",))
    monkeypatch.setattr(case, "usage_of", lambda call, device: slow)
    found = ampopt.diagnose(nn.Linear(4, 4).eval(), torch.randn(2, 4), budget_s=15, progress=False)
    assert found.usage.keys() == {"fp32", "amp"}
    assert found.to_dict()["usage"]["amp"]["power_w"] == 143.4
    text = " ".join(str(found).split())
    assert "power in fp32: 57.3 mJ a call, 143 W, 1200 MHz" in text
    assert "the GPU ran at 1200 of 1980 MHz in amp: its power limit" in text
    assert any("57.3 mJ a call" in figure.note for figure in found.document().figures)


def test_a_meter_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(call: object, device: object) -> Usage:
        raise RuntimeError("no meter")

    monkeypatch.setattr(case, "usage_of", failing)
    found = ampopt.diagnose(nn.Linear(4, 4).eval(), torch.randn(2, 4), budget_s=60, progress=False)
    assert not found.usage
    assert any("could not be read: RuntimeError: no meter" in note for note in found.notes)


@pytest.mark.parametrize(
    ("package", "told"), [(None, "ampopt[power]"), (object(), "does not tell them here")]
)
def test_a_gpu_without_meters_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, package: object, told: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(case, "usage_of", lambda call, device: None)
    found = case_of(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    for _ in range(2):
        found.read_usage("fp32", lambda: None, 1e-3)
    assert not found.notes, "a processor without RAPL is no fault"
    found.device = torch.device("cuda")
    for _ in range(2):
        found.read_usage("fp32", lambda: None, 1e-3)
    (note,) = found.notes
    assert note.startswith("no clocks, power and energy: ")
    assert told in note


def row(batch: int, call_ms: float, kernels_ms: float, amp_ms: float = 1.0) -> BatchRow:
    latency = {"fp32": Measurement((1e-3 * call_ms,)), "amp": Measurement((1e-3 * amp_ms,))}
    return BatchRow(batch, latency, {"fp32": 1e-3 * kernels_ms})


@pytest.mark.parametrize(
    ("kernels_ms", "told"),
    [
        ((0.2, 0.7, 0.95), "fp32 waits for launches up to batch 8; with 64 5% of a call is gaps"),
        ((0.2, 0.3, 0.7), "fp32 waits for launches in every batch (30% gaps in the last)"),
        ((0.9, 0.3, 1.2), "fp32 waits for launches in no batch (10% gaps in the first)"),
    ],
)
def test_up_to_which_batch_launches_are_waited_for(kernels_ms: tuple[float, ...], told: str) -> None:
    rows = [row(batch, 1.0, busy) for batch, busy in zip((1, 8, 64), kernels_ms, strict=True)]
    assert crossings_told(rows) == ["amp is not faster than FP32 in the end", told]
    assert rows[0].to_dict()["lanes"]["fp32"]["gaps"] == pytest.approx(1 - kernels_ms[0])
    assert "gaps" not in rows[0].to_dict()["lanes"]["amp"]


@pytest.fixture
def small_convolutions() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(20) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers).eval().cuda(), torch.randn(1, 16, 32, 32, device="cuda")


@pytest.mark.gpu
def test_a_gpu_tells_its_power(small_convolutions: tuple[nn.Module, torch.Tensor]) -> None:
    pytest.importorskip("pynvml")
    found = ampopt.diagnose(*small_convolutions, budget_s=15, progress=False)
    assert found.usage
    for used in found.usage.values():
        assert used.sm_mhz is not None
        assert used.power_w is not None
        assert used.energy_j is not None
        assert 100 < used.sm_mhz < 4000
        assert 20 < used.power_w < 2000
        seconds = found.latency["fp32"].median
        assert 0.1 < used.energy_j / (used.power_w * seconds) < 10


@pytest.mark.gpu
@pytest.mark.timing
def test_a_gpu_tells_where_launches_are_waited_for(
    small_convolutions: tuple[nn.Module, torch.Tensor],
) -> None:
    found = ampopt.diagnose(*small_convolutions, batches=(1, 16, 256, 2048), budget_s=30, progress=False)
    first, *_, last = found.sweep
    assert last.batch == 2048
    assert (first.gaps("fp32") or 0.0) > 0.4
    assert (last.gaps("fp32") or 0.0) < 0.2
    assert "fp32 waits for launches up to batch" in " ".join(str(found).split())
