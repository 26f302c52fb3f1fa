"""A call on a device as something to time: what waits for its end, and what reads the device's meters."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ampopt.system.meters import cpu_meter, gpu_meter
from benchmarks.regimes import Subject


def subject_of(call: Callable[[], object], device: torch.device) -> Subject:
    """The subject of a call on a device."""
    if device.type == "cpu":
        return Subject(call, meter=cpu_meter())
    synchronize = functools.partial(torch.cuda.synchronize, device)
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return Subject(call, synchronize, gpu_meter(uuid), queues=True)
