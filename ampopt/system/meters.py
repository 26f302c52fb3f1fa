"""What a device says of itself: clocks, power and energy of a GPU, energy of a processor.

A GPU's come through `nvidia-ml-py`, a processor's through RAPL's files in /sys; where either is not to be
had, readings are empty.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")

Readings = dict[str, float]

logger = logging.getLogger("ampopt")

_REASON = "nvmlClocksThrottleReason"
_SLOWED = {
    "ApplicationsClocksSetting": "its clocks are set to that",
    "SwPowerCap": "its power limit",
    "HwSlowdown": "its hardware slows it down",
    "SwThermalSlowdown": "heat, says its driver",
    "HwThermalSlowdown": "heat, says its hardware",
    "HwPowerBrakeSlowdown": "its power supply",
}
"""What NVML's reasons for lower clocks mean; `GpuIdle`, where nothing runs, is none."""


def gpu_meter(uuid: str) -> Callable[[], Readings]:
    """Readings of a GPU by its identity: `sm_mhz`, `memory_mhz`, `power_w`, and `energy_j` used so far."""
    found = _device_of(uuid)
    if found is None:
        return dict
    nvml, handle = found
    asked: dict[str, Callable[[], float]] = {
        "sm_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
    }
    return _of_those_that_answer(asked)


def why_no_gpu_meter() -> str:
    """Why a GPU tells nothing of itself, and what to do."""
    if importlib.util.find_spec("pynvml") is None:
        return "they need nvidia-ml-py: pip install 'ampopt[power]'"
    return "NVIDIA's management library does not tell them here"


def most_sm_mhz(uuid: str) -> float | None:
    """The highest clock of a GPU's multiprocessors, in MHz; None where it does not tell."""
    if (found := _device_of(uuid)) is None:
        return None
    nvml, handle = found
    try:
        return float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    except Exception as error:
        logger.debug("ampopt: a GPU does not tell its highest clock: %s", error)
        return None


def why_slowed(uuid: str) -> tuple[str, ...]:
    """Why a GPU's clocks are lower now than they could be; empty where they are not, or it does not tell."""
    if (found := _device_of(uuid)) is None:
        return ()
    nvml, handle = found
    try:
        reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    except Exception as error:
        logger.debug("ampopt: a GPU does not tell why its clocks are low: %s", error)
        return ()
    bits = {words: int(getattr(nvml, _REASON + name, 0)) for name, words in _SLOWED.items()}
    return tuple(words for words, bit in bits.items() if reasons & bit)


def cpu_meter(root: Path = RAPL) -> Callable[[], Readings]:
    """Readings of the processor's packages: `energy_j` used so far by all of them together."""
    files = [file for file in root.glob("intel-rapl:*/energy_uj") if file.parent.name.count(":") == 1]
    return _of_those_that_answer({"energy_j": lambda: _sum_of(files)} if files else {})


def _device_of(uuid: str) -> tuple[Any, Any] | None:
    """NVIDIA's library and its handle of a GPU; None where there is no library, driver or permission."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception as error:
        logger.debug("ampopt: no meter of a GPU: %s", error)
        return None


def _sum_of(files: list[Path]) -> float:
    return sum(int(file.read_text(encoding="utf-8")) for file in files) / 1e6


def _of_those_that_answer(asked: dict[str, Callable[[], float]]) -> Callable[[], Readings]:
    """Only what can be read now is read later: a device may lack a counter, or forbid it."""
    answers: dict[str, Callable[[], float]] = {}
    for name, read in asked.items():
        try:
            read()
        except Exception as error:  # of the driver's library, or of the file
            logger.debug("ampopt: %s is left out: %s", name, error)
            continue
        answers[name] = read
    return lambda: {name: read() for name, read in answers.items()}
