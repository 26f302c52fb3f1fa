"""What the calls of a lane use of their device while they follow each other: clocks, power, energy."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ampopt.measure.clocks import synchronize
from ampopt.system.meters import Readings, cpu_meter, gpu_meter, most_sm_mhz, why_slowed

SECONDS = 0.5
"""Time in which calls follow each other; a GPU counts its energy every 20 to 100 ms."""

TICK_S = 0.3
"""Longest wait for a counter of energy to move."""

LOW = 0.9
"""Below this share of the highest clock a GPU is slowed down."""

Meter = Callable[[], Readings]


@dataclasses.dataclass(frozen=True)
class Usage:
    """Clocks in MHz, power in watts, and the energy of a call in joules; None: the device does not tell.

    `most_sm_mhz` is the highest clock of the multiprocessors, and `slowed` why theirs was lower.
    """

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    most_sm_mhz: float | None = None
    slowed: tuple[str, ...] = ()

    @property
    def is_slowed(self) -> bool:
        """Whether the clock was far below the highest one."""
        if self.sm_mhz is None or self.most_sm_mhz is None:
            return False
        return self.sm_mhz < LOW * self.most_sm_mhz

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the energy of a call in millijoules."""
        return {
            "sm_mhz": self.sm_mhz,
            "most_sm_mhz": self.most_sm_mhz,
            "memory_mhz": self.memory_mhz,
            "power_w": None if self.power_w is None else round(self.power_w, 2),
            "energy_mj": None if self.energy_j is None else round(1e3 * self.energy_j, 4),
            "slowed": list(self.slowed),
        }

    def __str__(self) -> str:
        told = [
            "" if self.energy_j is None else f"{1e3 * self.energy_j:.3g} mJ a call",
            "" if self.power_w is None else f"{self.power_w:.3g} W",
            "" if self.sm_mhz is None else f"{self.sm_mhz:.0f} MHz",
            "" if self.memory_mhz is None else f"memory {self.memory_mhz:.0f} MHz",
        ]
        return ", ".join(filter(None, told))


def usage_of(
    call: Callable[[], object],
    device: torch.device,
    *,
    seconds: float = SECONDS,
    meter: Meter | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Usage | None:
    """What calls use, each of which waits for the one before it; None where the device has no meters.

    The energy of a call is that of the whole device between two ticks of its counter, over the calls between
    them: also what it takes at rest.
    """
    uuid = _uuid_of(device)
    read = meter or (gpu_meter(uuid) if device.type == "cuda" else cpu_meter())
    if not read():
        return None
    calls = 0

    def run() -> None:
        nonlocal calls
        call()
        synchronize(device)
        calls += 1

    def next_tick() -> tuple[float, float, int] | None:
        """Joules, seconds and calls where the counter of energy has just moved."""
        start, before = clock(), read().get("energy_j")
        while before is not None and clock() - start < TICK_S:
            run()
            if (now := read()["energy_j"]) != before:
                return now, clock(), calls
        return None

    began, end = next_tick(), clock() + seconds
    run()
    while clock() < end:
        run()
    found = read()
    slowed = why_slowed(uuid) if device.type == "cuda" else ()
    ended = None if began is None else next_tick()
    power, energy = found.get("power_w"), None
    if began is not None and ended is not None:
        used, took, count = (after - before for after, before in zip(ended, began, strict=True))
        power, energy = used / took, used / count
    most = most_sm_mhz(uuid) if device.type == "cuda" else None
    return Usage(found.get("sm_mhz"), found.get("memory_mhz"), power, energy, most, slowed)


@functools.cache
def _uuid_of(device: torch.device) -> str:
    """A GPU's identity; empty on a CPU."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
