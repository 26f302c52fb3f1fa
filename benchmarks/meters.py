"""What a device says of itself: clocks, power and energy of a GPU, energy of a processor.

A GPU's come through `nvidia-ml-py`, a processor's through RAPL's files in /sys; where either is not to be
had, readings are empty.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")

Readings = dict[str, float]


def gpu_meter(uuid: str) -> Callable[[], Readings]:
    """Readings of a GPU by its identity: `sm_mhz`, `memory_mhz`, `power_w`, and `energy_j` used so far."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception:  # the package, the library or the permission is missing
        return dict
    asked: dict[str, Callable[[], float]] = {
        "sm_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
    }
    return _of_those_that_answer(asked)


def cpu_meter(root: Path = RAPL) -> Callable[[], Readings]:
    """Readings of the processor's packages: `energy_j` used so far by all of them together."""
    files = [file for file in root.glob("intel-rapl:*/energy_uj") if file.parent.name.count(":") == 1]
    return _of_those_that_answer({"energy_j": lambda: _sum_of(files)} if files else {})


def _sum_of(files: list[Path]) -> float:
    return sum(int(file.read_text(encoding="utf-8")) for file in files) / 1e6


def _of_those_that_answer(asked: dict[str, Callable[[], float]]) -> Callable[[], Readings]:
    """Only what can be read now is read later: a device may lack a counter, or forbid it; stderr says why."""
    answers: dict[str, Callable[[], float]] = {}
    for name, read in asked.items():
        try:
            read()
        except Exception as error:  # of the driver's library, or of the file
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        answers[name] = read
    return lambda: {name: read() for name, read in answers.items()}
