"""Finds the fastest OpenVINO options for a model on this machine by measuring them one after another."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampopt.measure.sampling import Measurement, gain, interleave, latency
from ampopt.ort.knobs import thread_counts
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner
from ampopt.ort.options import SessionError
from ampopt.ort.session import Array

Changes = Sequence[Mapping[str, Any]]
"""Settings that exclude each other, as changes of fields."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The fastest options, the model loaded with them, and its calls."""

    runner: OpenVinoRunner
    timed: Measurement

    @property
    def options(self) -> OpenVinoOptions:
        """The fastest options."""
        return self.runner.options


def tune_openvino(
    best: OpenVinoRunner, model: bytes | Path, inputs: Sequence[Array], *, seconds: float
) -> Found:
    """Sweep threads, pinning and the latency hint for about `seconds`, including loading.

    The sweep starts from `best`, the model with its options, whose precision stays. A setting is kept if it
    is faster outside the noise.
    """
    end = time.perf_counter() + seconds
    timed = _measured([best], inputs, seconds=0.1 * seconds)[0]
    knobs = list(_knobs())
    for turn, knob in enumerate(knobs):
        left = end - time.perf_counter()
        if left <= 0:
            break
        changed = [dataclasses.replace(best.options, **change) for change in knob]
        others = [found for options in changed if (found := _loaded(model, options)) is not None]
        if not others:
            continue
        times = _measured([best, *others], inputs, seconds=left / (len(knobs) - turn))
        best, timed = min(
            [(best, times[0])]
            + [pair for pair in zip(others, times[1:], strict=True) if gain(times[0], pair[1]).is_real],
            key=lambda pair: pair[1].median,
        )
    return Found(best, timed)


def _knobs() -> Iterator[Changes]:
    """What to try, the largest gains first; by default there is a thread for each core."""
    counts = thread_counts()
    yield [{"threads": count, "hyper_threading": count == counts[-1]} for count in counts]
    yield [{"pinning": True}]
    yield [{"latency": False}]


def _loaded(model: bytes | Path, options: OpenVinoOptions) -> OpenVinoRunner | None:
    try:
        return OpenVinoRunner(model, options)
    except SessionError:
        return None  # the best so far runs


def _measured(
    runners: Sequence[OpenVinoRunner], inputs: Sequence[Array], *, seconds: float
) -> list[Measurement]:
    samplers = {
        str(place): latency(functools.partial(runner, *inputs)) for place, runner in enumerate(runners)
    }
    return list(interleave(samplers, seconds=seconds).values())
