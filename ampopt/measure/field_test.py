"""Latency test for robots: frames at a camera's rate with idle gaps between them, then back to back.

The test works with any backend: a call takes a frame and returns when its outputs are ready. In the idle gaps
processors lower their clocks and caches become cold, which a loop without gaps does not show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ampopt.errors import InputError
from ampopt.system.wording import argument

QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p99.9_ms": 0.999}

CALLING_MS = 0.02
"""Time in milliseconds that a call of a robot's may take beside the promise, which is of the engine's alone.

Checks and names of its arrays took 0.004 ms on an AMD EPYC, as long as a network of two small layers.
"""

SPIN_NS = 200_000
"""Time before a frame that is busy-waited: a sleep may end this much too late."""

NAP_NS = 1_000_000
"""Time before the busy-wait that is slept in short naps; the time before that is one sleep."""


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Time in milliseconds from passing a frame to the call until its outputs are ready, in order."""

    samples: tuple[float, ...]

    def quantile(self, q: float) -> float | None:
        """The sample below which a share `q` lies; None if too few samples lie beyond it."""
        n = len(self.samples)
        if n * (1 - q) < 1 - 1e-9:
            return None
        return sorted(self.samples)[math.ceil(q * n - 1e-9) - 1]

    def to_dict(self) -> dict[str, Any]:
        """Quantiles and standard deviation (the jitter) in milliseconds, and the number of frames."""
        quantiles = {name: _rounded(self.quantile(q)) for name, q in QUANTILES.items()}
        jitter = statistics.pstdev(self.samples) if self.samples else None
        return {**quantiles, "jitter_ms": _rounded(jitter), "frames": len(self.samples)}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One test of a field test: the measured value, the promised value, and the limit.

    `limit` is `promised` plus slack. If a test does not decide, a failure is only a warning. `text` describes
    all of this.
    """

    test: str
    measured: float
    promised: float
    limit: float
    decides: bool
    text: str

    @property
    def passed(self) -> bool:
        """Whether the value is within the limit."""
        return self.measured <= self.limit

    @property
    def line(self) -> str:
        """The result as a line of text, with measured value and limit."""
        bad = "FAILED" if self.decides else "SLOWER THAN PROMISED"
        return f"{'passed' if self.passed else bad}: {self.text}"

    def to_dict(self) -> dict[str, Any]:
        """The finding for JSON; back-to-back times in milliseconds, deadlines in frames."""
        numbers = {name: _rounded(getattr(self, name)) for name in ("measured", "promised", "limit")}
        return {"test": self.test, **numbers, "decides": self.decides, "passed": self.passed}


@dataclasses.dataclass(frozen=True)
class Judgment:
    """The results of all tests, and whether the field test passed."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether every deciding test passed."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons of a failure: the deciding tests that failed."""
        return tuple(found.text for found in self.findings if found.decides and not found.passed)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The tests that failed and do not decide."""
        return tuple(found.text for found in self.findings if not found.decides and not found.passed)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "passed": self.passed,
            "reasons": list(self.reasons),
            "warnings": list(self.warnings),
            "tests": [found.to_dict() for found in self.findings],
        }


@dataclasses.dataclass(frozen=True)
class FieldReport:
    """The measurements of a field test.

    `first_ms` is the time of the first call, which is excluded from all others. `paced` is at the camera's
    rate, `back_to_back` without gaps. `missed` counts the paced frames that were not done within
    `deadline_ms` of their arrival, `dropped` those that a newer frame replaced before their call started.
    `start_jitter_ms` is the standard deviation of the time from a frame's arrival to its call. `memory_bytes`
    is the largest resident set of the process so far, None if the system does not provide it;
    `gpu_memory_bytes` is None if it was not requested.
    """

    hz: float
    deadline_ms: float
    first_ms: float
    paced: Latencies
    back_to_back: Latencies
    missed: int
    dropped: int
    start_jitter_ms: float
    memory_bytes: int | None
    gpu_memory_bytes: int | None = None

    def judge(
        self,
        expected: Mapping[str, Any] | None,
        *,
        slack: float = 0.25,
        missed_share: float = 0.0,
        strict: bool = False,
    ) -> Judgment:
        """Judge the deadlines, and back-to-back calls by a manifest's expected `p50_ms` and `p99_ms`.

        At most a share `missed_share` of the frames may miss the deadline or be dropped: this test decides.
        An expected latency was measured on another machine, or under less load: exceeding it by more than the
        share `slack`, and by more than `CALLING_MS`, is a warning, and decides only if `strict`. Latencies
        that are not expected, or have too few frames, are not judged. Raises InputError if `slack` is
        negative.
        """
        if not 0 <= slack < math.inf:
            raise InputError(f"slack {slack:g}: give a share, 0 or more, such as 0.25")
        findings = [self._deadlines(missed_share)]
        for key in ("p50_ms", "p99_ms"):
            promised, found = (expected or {}).get(key), self.back_to_back.quantile(QUANTILES[key])
            if promised is not None and found is not None:
                findings.append(
                    _back_to_back_finding(key.removesuffix("_ms"), found, promised, slack, strict)
                )
        return Judgment(tuple(findings))

    def _deadlines(self, missed_share: float) -> Finding:
        late, arrived = self.missed + self.dropped, len(self.paced.samples) + self.dropped
        if late:
            text = (
                f"{self.missed} of {arrived} frames at {self.hz:g} Hz missed the deadline of"
                f" {self.deadline_ms:g} ms, and {self.dropped} were dropped"
            )
        else:
            text = f"all {arrived} frames at {self.hz:g} Hz met the deadline of {self.deadline_ms:g} ms"
        return Finding("deadlines", late, 0, missed_share * arrived, True, text)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, times in milliseconds; a percentile for which there are too few frames is null."""
        return {
            "hz": self.hz,
            "deadline_ms": _rounded(self.deadline_ms),
            "first_frame_ms": _rounded(self.first_ms),
            "paced": self.paced.to_dict(),
            "back_to_back": self.back_to_back.to_dict(),
            "missed_deadlines": self.missed,
            "dropped_frames": self.dropped,
            "start_jitter_ms": _rounded(self.start_jitter_ms),
            "memory_bytes": self.memory_bytes,
            "gpu_memory_bytes": self.gpu_memory_bytes,
        }


def _back_to_back_finding(name: str, measured: float, promised: float, slack: float, strict: bool) -> Finding:
    limit = max(promised * (1 + slack), promised + CALLING_MS)
    text = f"{name} back to back is {measured:.3f} ms where {promised:.3f} ms was expected"
    if measured > promised:
        place = "within" if measured <= limit else "more than"
        allowed = f"{slack:.0%} slack" if limit > promised + CALLING_MS else f"{CALLING_MS:g} ms for the call"
        text += f", {place} the {limit:.3f} ms of {allowed}"
    return Finding(f"{name} back to back", measured, promised, limit, strict, text)


def check_field_test(hz: float, seconds: float, deadline_ms: float | None) -> None:
    """Raise InputError if rate, time or deadline is not positive, or if no frame fits into the time."""
    if not (hz > 0 and 0 < 1e3 / hz < math.inf):
        raise InputError(f"{argument('hz', hz)}: give a field test a positive rate, in frames a second")
    if not (math.isfinite(hz * seconds) and hz * seconds >= 1):
        raise InputError(
            f"{argument('seconds', seconds)}: give a field test the time for a frame, {1 / hz:.3g} or more"
        )
    if deadline_ms is not None and not deadline_ms > 0:
        raise InputError(
            f"{argument('deadline_ms', deadline_ms)}: give a field test a positive deadline, or none"
        )


def field_test(
    call: Callable[[], object],
    *,
    hz: float,
    seconds: float,
    deadline_ms: float | None = None,
    gpu_memory: Callable[[], int] | None = None,
) -> FieldReport:
    """Call once a frame for `seconds` at `hz` frames a second, then as many times back to back.

    A frame must be done `deadline_ms` after it arrives, by default when the next one is due. A call that
    takes longer finds the newest frame waiting; the others are dropped. `gpu_memory` returns the peak in
    bytes. Python's garbage collector runs before each part, but not during it. Raises InputError as
    `check_field_test` does.
    """
    check_field_test(hz, seconds, deadline_ms)
    deadline_ms = 1e3 / hz if deadline_ms is None else deadline_ms
    frames, period = int(hz * seconds + 1e-9), round(1e9 / hz)
    with _collected():
        (first,) = _back_to_back(call, 1)
    with _collected():
        arrivals = _paced(call, frames, period)
    with _collected():
        back_to_back = _back_to_back(call, len(arrivals))
    late = [end - due for due, _, end in arrivals]
    return FieldReport(
        hz=hz,
        deadline_ms=deadline_ms,
        first_ms=first,
        paced=Latencies(tuple((end - start) / 1e6 for _, start, end in arrivals)),
        back_to_back=Latencies(tuple(back_to_back)),
        missed=sum(ns > deadline_ms * 1e6 for ns in late),
        dropped=frames - len(arrivals),
        start_jitter_ms=statistics.pstdev((start - due) / 1e6 for due, start, _ in arrivals),
        memory_bytes=_peak_memory(),
        gpu_memory_bytes=None if gpu_memory is None else gpu_memory(),
    )


def _paced(call: Callable[[], object], frames: int, period: int) -> list[tuple[int, int, int]]:
    """When each frame that was not dropped arrived, was begun and was done, in nanoseconds."""
    found = []
    origin, frame = time.perf_counter_ns() + period, 0
    while frame < frames:
        due = origin + frame * period
        start = _wait_until(due)
        call()
        end = time.perf_counter_ns()
        found.append((due, start, end))
        newest = (end - origin) // period
        frame = max(frame + 1, newest)
    return found


def _back_to_back(call: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        start = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - start) / 1e6)
    return found


def _wait_until(due: int) -> int:
    """Sleep until shortly before `due`, in nanoseconds of the performance counter; returns the time after."""
    while (left := due - (now := time.perf_counter_ns())) > 0:
        if left > 2 * NAP_NS:
            time.sleep((left - NAP_NS) / 1e9)
        elif left > SPIN_NS:
            time.sleep(SPIN_NS / 2e9)
    return now


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Garbage is collected before the block and not within it."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _peak_memory() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
