"""The batch sweep: from which batch on AMP pays, and up to which one launches are waited for."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.diagnosis.case import LEAST_GAPS, eager_call
from ampopt.diagnosis.layers import OPTIMIZED
from ampopt.diagnosis.operators import kernels_s
from ampopt.errors import first_line, is_passing
from ampopt.ir.lanes import Lane
from ampopt.ir.signature import flatten_call, map_tensors, tensors_of
from ampopt.measure.clocks import SETTLE_S, settled_latency
from ampopt.measure.sampling import Measurement, Sampler, interleave
from ampopt.system.interrupts import check_interrupted

LEAST, MOST = 3, 30


@dataclasses.dataclass(frozen=True)
class BatchRow:
    """The latency of a call of one batch in each lane, and on a GPU the seconds of its kernels."""

    batch: int
    latency: Mapping[str, Measurement]
    kernels_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def throughput(self, lane: str) -> float:
        """Examples a second."""
        return self.batch / self.latency[lane].median

    def gaps(self, lane: str) -> float | None:
        """The share of a call in which no kernel runs; None where that is not known."""
        if lane not in self.kernels_s:
            return None
        return max(1 - self.kernels_s[lane] / self.latency[lane].median, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, times in milliseconds and throughput in examples a second."""
        lanes: dict[str, dict[str, Any]] = {}
        for lane, measured in self.latency.items():
            lanes[lane] = {**measured.to_dict(), "per_s": round(self.throughput(lane), 3)}
            if (gaps := self.gaps(lane)) is not None:
                lanes[lane] |= {"kernels_ms": round(1e3 * self.kernels_s[lane], 6), "gaps": round(gaps, 4)}
        return {"batch": self.batch, "lanes": lanes}


def sweep(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    lanes: Sequence[Lane],
    batches: Sequence[int],
    seconds: float,
    example_s: float,
    optimized: Callable[..., object] | None = None,
) -> tuple[list[BatchRow], str | None]:
    """The rows of the batches, smallest first, until memory or `seconds` are out; and why it ended, if so.

    The batch is the first dimension of every tensor that has as many entries there as the first tensor.
    `example_s`: seconds that the example's calls take, in all lanes together; a batch is expected to take as
    much for each of its entries as the one before it. `optimized` is sampled beside the lanes, after a call
    with which it takes in the new shape.
    """
    rows: list[BatchRow] = []
    started, last_batch, last_s = time.perf_counter(), max(_batch_of(args, kwargs), 1), example_s
    for place, batch in enumerate(sorted(batches)):
        left_s = seconds - (time.perf_counter() - started)
        settling_s = LEAST * SETTLE_S * (len(lanes) + (optimized is not None))
        if (2 * LEAST + 1) * last_s * batch / last_batch + settling_s > left_s:
            return rows, f"the batch sweep ended before {batch}: its time was over"
        try:
            own_args, own_kwargs = of_batch(args, kwargs, batch)
            calls = {lane.name: eager_call(model, own_args, own_kwargs, device, lane) for lane in lanes}
            samplers = {name: settled_latency(call, device) for name, call in calls.items()}
            if optimized is not None:
                samplers[OPTIMIZED] = _of_optimized(optimized, own_args, own_kwargs, device)
                left_s = seconds - (time.perf_counter() - started)
            share = max(left_s, 0.0) / (len(batches) - place)
            timed = interleave(samplers, seconds=min(share, 2.0), least=LEAST, most=MOST)
            rows.append(BatchRow(batch, timed, _kernels_s(calls, device)))
            last_batch, last_s = batch, sum(each.median for each in rows[-1].latency.values())
        except Exception as error:
            check_interrupted(error)
            why = "memory was out" if is_passing(error) else first_line(error)
            return rows, f"the batch sweep ended before {batch}: {why}"
    return rows, None


def _kernels_s(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    return {name: kernels_s(call, device) for name, call in calls.items()}


def _of_optimized(
    module: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> Sampler:
    module(*args, **kwargs)
    return settled_latency(lambda: module(*args, **kwargs), device)


def of_batch(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call of another batch: examples are repeated in turn."""
    count = _batch_of(args, kwargs)

    def repeated(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != count:
            return tensor
        return tensor[torch.arange(batch, device=tensor.device) % count]

    return map_tensors(repeated, args, kwargs)


def _batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The first dimension of the first tensor that has one; 0 if none has."""
    return next((t.shape[0] for t in tensors_of(flatten_call(args, kwargs)[0]) if t.dim()), 0)


def pays_from(rows: Sequence[BatchRow], lane: str) -> int | None:
    """The smallest batch from which on a lane is faster than FP32 in every row; None if in none."""
    found = None
    for row in reversed(rows):
        if lane not in row.latency or row.latency[lane].median >= row.latency["fp32"].median:
            break
        found = row.batch
    return found


def crossings_told(rows: Sequence[BatchRow]) -> list[str]:
    """In words, for each lane: from which batch on it is faster than FP32, and where launches hold it up."""
    told = list[str]()
    for lane in list(rows[0].latency)[1:]:
        batch = pays_from(rows, lane)
        pays = f"is faster than FP32 from batch {batch} on" if batch else "is not faster than FP32 in the end"
        told.append(f"{lane} {pays}")
    for lane in rows[0].kernels_s:
        gaps = [(row.batch, row.gaps(lane) or 0.0) for row in rows if lane in row.latency]
        bound = [batch for batch, share in itertools.takewhile(lambda each: each[1] >= LEAST_GAPS, gaps)]
        if len(bound) == len(gaps):
            told.append(f"{lane} waits for launches in every batch ({gaps[-1][1]:.0%} gaps in the last)")
        elif bound:
            first, share = gaps[len(bound)]
            then = f"with {first} {share:.0%} of a call is gaps"
            told.append(f"{lane} waits for launches up to batch {bound[-1]}; {then}")
        else:
            told.append(f"{lane} waits for launches in no batch ({gaps[0][1]:.0%} gaps in the first)")
    return told
