"""Readings of a GPU and of a processor, where there are any."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from ampopt.system.meters import cpu_meter, gpu_meter, most_sm_mhz, why_slowed


def nvml(**broken: Exception) -> types.ModuleType:
    """In place of NVIDIA's library; `broken` functions raise."""
    made = types.ModuleType("pynvml")
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {"sm": 1980, "memory": 3201}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {"sm": 2100, "memory": 3201}[kind],
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x1 | 0x4 | 0x40,
        "nvmlDeviceGetPowerUsage": lambda handle: 350_500,
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 12_000 if handle == "GPU-abc" else 0,
    }
    for name, answer in answers.items():

        def function(*arguments: object, name: str = name, answer: object = answer) -> object:
            if name in broken:
                raise broken[name]
            assert callable(answer)
            return answer(*arguments)

        setattr(made, name, function)
    vars(made).update(NVML_CLOCK_SM="sm", NVML_CLOCK_MEM="memory")
    reasons = {"GpuIdle": 0x1, "SwPowerCap": 0x4, "HwThermalSlowdown": 0x40, "SwThermalSlowdown": 0x20}
    vars(made).update({f"nvmlClocksThrottleReason{name}": bit for name, bit in reasons.items()})
    return made


def test_a_gpu_says_its_clocks_power_and_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert gpu_meter("abc")() == {"sm_mhz": 1980, "memory_mhz": 3201, "power_w": 350.5, "energy_j": 12.0}


def test_a_gpu_says_why_its_clocks_are_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert most_sm_mhz("abc") == 2100
    assert why_slowed("abc") == ("its power limit", "heat, says its hardware")
    refusing = nvml(
        nvmlDeviceGetMaxClockInfo=RuntimeError("Not Supported"),
        nvmlDeviceGetCurrentClocksThrottleReasons=RuntimeError("Not Supported"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", refusing)
    assert most_sm_mhz("abc") is None
    assert why_slowed("abc") == ()


def test_a_counter_that_a_gpu_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = nvml(nvmlDeviceGetTotalEnergyConsumption=RuntimeError("Not Supported"))
    monkeypatch.setitem(sys.modules, "pynvml", lacking)
    assert set(gpu_meter("GPU-abc")()) == {"sm_mhz", "memory_mhz", "power_w"}


@pytest.mark.parametrize("module", [None, nvml(nvmlInit=RuntimeError("no driver"))])
def test_without_the_library_or_the_driver_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert gpu_meter("abc")() == {}
    assert most_sm_mhz("abc") is None
    assert why_slowed("abc") == ()


def test_a_processor_says_the_energy_of_its_packages(tmp_path: Path) -> None:
    assert cpu_meter(tmp_path)() == {}
    for name, energy in (
        ("intel-rapl:0", 2_000_000),
        ("intel-rapl:1", 500_000),
        ("intel-rapl:0:0", 9_000_000),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(str(energy))
    assert cpu_meter(tmp_path)() == {"energy_j": 2.5}, "a package's cores are part of it"
