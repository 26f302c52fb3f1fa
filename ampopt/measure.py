"""Samplers on two clocks.

*Latency* is one call as its user makes it, synchronised. *Device time* is the kernels alone with the gaps
between their launches removed: the time of a CUDA-graph replay. On a CPU the two coincide.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ampopt.sampling import Sampler

LONG_CALL_S = 0.02
"""From here on a call is timed without an untimed one before it."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def latency(call: Callable[[], object], device: torch.device) -> Sampler:
    """Samples the latency of one synchronised call, by the host's clock.

    An untimed call goes before each timed one, so that it finds the caches as the subject's own last call
    left them and not as the other subjects' did; where a call takes long, caches matter no more.
    """
    last = 0.0

    def sample() -> float:
        nonlocal last
        if last < LONG_CALL_S:
            call()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        last = time.perf_counter() - start
        return last

    return sample


def shortest_of_two(call: Callable[[], object], device: torch.device, *, long_s: float) -> float:
    """Seconds that a call takes: the first one where it is not longer than `long_s`, else the better of two.

    A first call may be long because libraries load and kernels are chosen in it.
    """

    def once() -> float:
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        return time.perf_counter() - start

    first = once()
    return first if first <= long_s else min(first, once())


def device_time(replay: Callable[[], object], device: torch.device) -> Sampler:
    """Samples the device time of one replay of a CUDA graph: many in a row between two events."""
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    count = 0

    def run(times: int) -> float:
        with torch.cuda.device(device):
            first.record()
            for _ in range(times):
                replay()
            last.record()
            last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / times

    def sample() -> float:
        nonlocal count
        if count == 0:
            count = max(1, min(50, round(2e-3 / max(run(1), 1e-6))))
        return run(count)

    return sample


def peak_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that one call takes on a GPU beyond what was allocated before it; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
