"""Memory that every call takes from the system anew, because it was given back after the call before.

glibc gives back what is free at the end of its heap, and the next call pays a page fault for each 4 KiB. What
lies at the end depends on everything that a process has done: importing a compiler may end it. So this is
examined before anything else, and everything after it is measured with memory that the process keeps: else
two ways to run a model would differ by what lies where.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator

import torch

from ampopt.diagnosis.finding import Counterfactual
from ampopt.measure.clocks import latency
from ampopt.measure.sampling import Measurement, gain

CALLS, LEAST_CALLS = 10, 2
"""Calls in which faults are counted, after one that is not; the fewest, of slow calls."""

LEAST_BYTES = 1 << 20
"""From so much memory a call on it is worth a look: the system clears 1 MiB in about 0.2 ms."""

CHUNK = 1 << 16
"""Bytes of a block that glibc takes from its heap; from 128 KiB on it asks the system for some."""

SPARE = 2
"""How many times the memory that a call takes anew is kept for it: blocks do not fit without gaps."""

KEPT = 1 << 27
"""Bytes that are kept at least while a model is measured; what no call uses costs no memory."""

LEAST_ROUNDS, ROUNDS = 6, 20
"""Samples of each way, as many as `SECONDS` allow."""

SECONDS = 6.0
"""Seconds for all calls; where they do not suffice for the fewest samples, nothing is examined."""


@dataclasses.dataclass(frozen=True)
class Refilled:
    """Bytes and page faults of a call, and what it takes where the process keeps that memory."""

    taken: float
    faults: float
    kept: Counterfactual


def examine_heap(call: Callable[[], object], device: torch.device, call_s: float) -> Refilled | None:
    """What calls of about `call_s` seconds take from the system; None if it is little, or cannot be told."""
    affordable = SECONDS / max(call_s, 1e-9)
    if not _gives_back(device) or affordable < 2 * LEAST_ROUNDS + LEAST_CALLS:
        return None
    calls = CALLS if affordable >= 2 * LEAST_ROUNDS + CALLS else LEAST_CALLS
    faults, page = _faults(call, calls)
    if faults * page < LEAST_BYTES:
        return None
    sampler = latency(call, device)
    rounds = max(LEAST_ROUNDS, min(ROUNDS, int((affordable - calls) / 2)))

    def sampled() -> Measurement:
        return Measurement(tuple(sampler() for _ in range(rounds)))

    before = sampled()
    with kept(device, SPARE * int(faults * page)):
        after = sampled()
    change = "with this memory kept by the process"
    return Refilled(faults * page, faults, Counterfactual(change, before, after, gain(before, after)))


def _gives_back(device: torch.device) -> bool:
    """Whether calls on a device use a heap that may be given back."""
    return device.type == "cpu" and sys.platform.startswith("linux")


def _faults(call: Callable[[], object], calls: int) -> tuple[float, int]:
    """Minor page faults of a call, and the bytes of a page."""
    import resource  # Unix alone has it

    call()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls, resource.getpagesize()


@contextlib.contextmanager
def kept(device: torch.device, size: int = KEPT) -> Iterator[None]:
    """Free memory of this size in the heap of calls on a device, below a block that keeps it there."""
    if not _gives_back(device):
        yield
        return
    blocks = [torch.empty(CHUNK, dtype=torch.uint8, device="cpu") for _ in range(size // CHUNK + 2)]
    last = blocks.pop()
    del blocks
    yield
    del last
