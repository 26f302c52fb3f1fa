"""Two clocks for timing: latency and device time.

*Latency* is the time of one call as its user makes it, synchronised. *Device time* is the kernels alone with
the gaps between their launches removed: the time of a CUDA-graph replay. On a CPU the two coincide.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from ampopt.ir.eager_mode import EagerMode
from ampopt.measure import sampling
from ampopt.measure.sampling import Sampler

MOST_CALLS_TO_LOAD, CLEARLY_SHORTER = 4, 0.8
"""First calls that may load something; a call of at most 0.8 times the one before says that it still did."""


def synchronize(device: torch.device) -> None:
    """Wait until all work on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def latency(
    call: Callable[[], object],
    device: torch.device,
    *,
    long_s: float = sampling.LONG_CALL_S,
    last_s: float = 0.0,
) -> Sampler:
    """A sampler of one synchronised call's latency on a device, see `sampling.latency`."""
    return sampling.latency(call, functools.partial(synchronize, device), long_s=long_s, last_s=last_s)


SETTLE_S = 0.03
"""How long, in seconds, calls run untimed before one that `settled_latency` times: at most eight of them."""


def settled_latency(call: Callable[[], object], device: torch.device, *, last_s: float = 0.0) -> Sampler:
    """As `latency`, for a call that is to take what it takes in a loop of its own.

    After one untimed call the caches still hold much of what another subject did between: MobileNetV3-small
    at 32x32 takes 4.8 ms in eager on a CPU then, 4.5 after five and 4.1 after twenty, as it does alone.
    """
    wait = functools.partial(synchronize, device)
    return sampling.latency(call, wait, last_s=last_s, settle_s=SETTLE_S)


LONG_ENGINE_CALL_S = 0.05
"""On a CPU, engine calls shorter than this are timed after an untimed call, see `engine_latency`."""


def engine_long_s(device: torch.device) -> float:
    """From this duration on, in seconds, `engine_latency` times a call without an untimed call before it."""
    return LONG_ENGINE_CALL_S if device.type == "cpu" else sampling.LONG_CALL_S


REST_S = 0.02
"""How long, in seconds, OpenMP's threads may spin after a call of PyTorch: GNU's for 18 ms on two cores."""


def engine_latency(
    call: Callable[[], object], device: torch.device, *, last_s: float = 0.0, rest_s: float = 0.0
) -> Sampler:
    """As `latency`, for subjects that may run in different engines.

    On a CPU the threads of one engine spin for milliseconds after its call, on the cores that the next
    engine's threads need: so longer calls, too, are timed after an untimed one, and after `rest_s` without
    calls; calls from `engine_long_s` on after a rest instead. Without a rest RegNet-Y 400MF in ONNX Runtime
    took 8.2 ms beside eager on two cores, and 5.9 alone.
    """
    sampler, last = latency(call, device, long_s=engine_long_s(device), last_s=last_s), last_s

    def sample() -> float:
        nonlocal last
        if pause_s := _pause_s(last, device, rest_s):
            time.sleep(pause_s)
        last = sampler()
        return last

    return sample


def engine_sample_s(call_s: float, device: torch.device, *, rest_s: float = 0.0) -> float:
    """The time in seconds that a sample of `engine_latency` takes."""
    calls = 1 if call_s >= engine_long_s(device) else 2
    return calls * call_s + _pause_s(call_s, device, rest_s)


def _pause_s(call_s: float, device: torch.device, rest_s: float) -> float:
    is_long = device.type == "cpu" and call_s >= engine_long_s(device)
    return max(rest_s, REST_S) if is_long else rest_s


def seconds_once_loaded(
    call: Callable[[], object], device: torch.device, *, long_s: float, most_s: float, loading_s: float
) -> float:
    """Time of a call in seconds, after its libraries are loaded and its kernels selected.

    First calls may be slow because they load libraries, or because of other load on the machine. A call of
    at most `long_s` counts at once. A slower one is repeated until the next is no longer clearly shorter, at
    most `MOST_CALLS_TO_LOAD` times; the shortest counts. The first calls may take `loading_s` together, later
    ones are aborted after `most_s`, before their next operator; infinity if all are aborted.
    """

    def once(limit_s: float) -> float:
        synchronize(device)
        try:
            with _GivingUp() as giving_up:  # which loads PyTorch's compiler
                start = time.perf_counter()
                giving_up.at = start + limit_s
                call()
            synchronize(device)
        except _GivenUpError:
            return math.inf
        return time.perf_counter() - start

    loaded = time.perf_counter() + loading_s
    shortest = once(max(loading_s, most_s))
    for _ in range(MOST_CALLS_TO_LOAD - 1):
        if shortest <= long_s:
            break
        seconds = once(max(loaded - time.perf_counter(), most_s))
        settled = seconds > CLEARLY_SHORTER * shortest or seconds == math.inf
        shortest = min(shortest, seconds)
        if settled:
            break
    return shortest


class _GivenUpError(Exception):
    """A call was given up."""


class _GivingUp(EagerMode):
    """Raises `_GivenUpError` at the first operator after a time on `time.perf_counter`'s clock."""

    supports_higher_order_operators = True
    at = math.inf

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the class."""
        if time.perf_counter() > self.at:
            raise _GivenUpError
        return func(*args, **(kwargs or {}))


def device_time(replay: Callable[[], object], device: torch.device, *, sample_s: float = 2e-3) -> Sampler:
    """A sampler of the device time of one CUDA-graph replay; each sample repeats it for about `sample_s`."""
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
            count = max(1, min(50, round(sample_s / max(run(1), 1e-6))))
        return run(count)

    return sample


def peak_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory in bytes that one call allocates on a GPU, above the present allocation; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
