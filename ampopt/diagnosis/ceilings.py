"""What this device reaches at best: bandwidth, arithmetic in each precision, and the cost of a launch."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from ampopt.ir.settings import Settings
from ampopt.measure.clocks import synchronize

Bound = Literal["compute", "memory", "launch"]

COPIED = {"cuda": 2**28, "cpu": 2**26}
"""Bytes that are copied: more than the last cache holds."""

SIZE = {"cuda": 4096, "cpu": 1024}
"""Rows of the square matrices whose product is timed; a slow precision gets a quarter of them."""

LAUNCHES = 200
"""Calls on a tensor of one element that are launched in a row."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The best of a few runs on an idle device.

    `bandwidth`: bytes a second that a copy reads and writes. `rates`: FLOP a second of a matrix product, by
    precision ("fp32", "tf32", "float16", "bfloat16"). `launch_s`: seconds in which the host issues one
    operator.
    """

    bandwidth: float
    rates: dict[str, float]
    launch_s: float

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP a second for operands of a dtype; FP32's for one that was not measured."""
        return self.rates.get(str(dtype).removeprefix("torch."), self.rates["fp32"])

    def least_s(self, flops: int, moved: int, launches: int, dtype: torch.dtype) -> dict[Bound, float]:
        """The least seconds of an operator by each limit: its FLOP, the bytes that it moves, its launches."""
        return {
            "compute": flops / self.rate(dtype),
            "memory": moved / self.bandwidth,
            "launch": launches * self.launch_s,
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON: GB/s, TFLOP/s and microseconds."""
        return {
            "copy_gb_s": round(self.bandwidth / 1e9, 2),
            "tflop_s": {name: round(rate / 1e12, 4) for name, rate in self.rates.items()},
            "launch_us": round(1e6 * self.launch_s, 3),
        }

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in self.rates.items())
        copied = f"copies {self.bandwidth / 1e9:.3g} GB/s"
        return f"{copied}; products {rates} TFLOP/s; a launch {1e6 * self.launch_s:.2g} µs"


def ceilings_of(device: torch.device, low: torch.dtype) -> Ceilings:
    """A device's ceilings with the threads that PyTorch has, which a process measures once for them."""
    return _measured(device, low, torch.get_num_threads())


@functools.cache
def _measured(device: torch.device, low: torch.dtype, _threads: int) -> Ceilings:
    return measure_ceilings(device, low)


def measure_ceilings(device: torch.device, low: torch.dtype, seconds: float = 2.0) -> Ceilings:
    """Measure a device's ceilings in about `seconds`; `low` is the dtype of its mixed lane."""
    share = seconds / (5 if device.type == "cuda" else 4)
    with Settings().scope(device):
        source = torch.ones(COPIED[device.type] // 4, device=device)
        target = torch.empty_like(source)
        copy_s = _best_s(functools.partial(target.copy_, source), device, share)
        rates = {"fp32": _product_rate(torch.float32, device, share)}
        one = torch.ones(1, device=device)
        launch_s = _best_s(lambda: [one.add(1.0) for _ in range(LAUNCHES)], device, share) / LAUNCHES
    if device.type == "cuda":
        with Settings(tf32=True).scope(device):
            rates["tf32"] = _product_rate(torch.float32, device, share)
    with Settings().scope(device):
        rates[str(low).removeprefix("torch.")] = _product_rate(low, device, share)
    return Ceilings(2 * source.nbytes / copy_s, rates, launch_s)


def _product_rate(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """FLOP a second; of small matrices alone where two products of large ones would take too long."""
    rows, rate = SIZE[device.type] // 4, 0.0
    for size in (rows, 4 * rows):
        a = torch.ones(size, size, device=device, dtype=dtype)
        spent_s = _best_s(functools.partial(torch.mm, a, a), device, seconds / 2)
        rate = max(rate, 2 * size**3 / spent_s)
        if 2 * 64 * spent_s > seconds:
            break
    return rate


def _best_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest of several calls, the first of which is not counted."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best
