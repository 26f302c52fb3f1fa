"""Finds the fastest ONNX Runtime options for a model on this machine by measuring them one after another.

Each option is changed on top of the best options so far. Its settings and the best so far are measured in
turn; a setting is kept only if it is significantly faster and its outputs are correct.

Calls follow one another in all this. Whether threads are better pinned to cores shows after idle gaps, in
which they rest, as between a camera's frames; so that is measured with gaps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from ampopt.measure.sampling import Gain, Measurement, gain, interleave, latency, rested
from ampopt.ort.knobs import Knob, changed, cores_to_pin, knobs_for, start_options
from ampopt.ort.options import CPU, PREFERRED
from ampopt.ort.session import (
    Array,
    OnnxRunner,
    SessionError,
    SessionOptions,
    onnxruntime,
    relative_error,
)

Setting = tuple[str, SessionOptions]
"""A setting's name in reports, and the changed options."""

Outcome = Literal["kept", "not faster", "wrong", "failed", "not tried"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting that was tried, its verdict, and the reason.

    `ratio` is its speedup over the best before it, with the 95 % interval from `low` to `high`; `error` is
    the largest relative error against the outputs of the initial options. `p99_ms` is None if fewer than 100
    calls were timed.
    """

    setting: str
    options: SessionOptions
    outcome: Outcome
    reason: str
    median_ms: float | None = None
    p99_ms: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row for JSON, which has no infinity: such an error is null, and the reason explains it.

        The JSON key for the outcome is `verdict`, as for passes in a report.
        """
        error = self.error if self.error is not None and math.isfinite(self.error) else None
        told = {"outcome": "verdict"}
        fields = {told.get(name, name): value for name, value in dataclasses.asdict(self).items()}
        return {**fields, "options": self.options.to_dict(), "error": error}


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The best options, their speedup over the initial options, and all settings that were tried."""

    best: SessionOptions
    ratio: float
    rows: tuple[Row, ...]
    onnxruntime: str

    def session(self) -> dict[str, Any]:
        """The session's entry in a bundle's manifest: its options, and the version that they hold for."""
        return {**self.best.to_dict(), "onnxruntime": self.onnxruntime}

    def to_dict(self) -> dict[str, Any]:
        """The tuning as JSON data."""
        return {"session": self.session(), "ratio": self.ratio, "rows": [row.to_dict() for row in self.rows]}


def tune(
    model: bytes | Path,
    inputs: Sequence[Array],
    *,
    seconds: float,
    providers: Sequence[str] | None = None,
    tf32: bool = False,
    tolerance: float = 1e-3,
) -> Tuning:
    """Sweep the options of the fastest of `providers` for about `seconds`, including loading.

    By default the providers are all of `PREFERRED` that this ONNX Runtime has; `tf32` is for a model in
    float16, see `SessionOptions.default`. Outputs may differ by `tolerance` (relative error) from those of
    the first provider that loads, with its default options. Raises InputError if the inputs do not fit the
    model, SessionError if no provider loads it.
    """
    if providers is None:
        found = onnxruntime().get_available_providers()
        providers = [provider for provider in PREFERRED if provider in found]
    end = time.perf_counter() + seconds
    with_gaps = min(GAPS_S, seconds / 2) if cores_to_pin(start_options(CPU)) else 0.0
    settings = [(provider, start_options(provider, tf32=tf32)) for provider in providers]
    sweep = _Sweep(model, tuple(inputs), settings, tolerance=tolerance, end=end - with_gaps)
    start, knobs = sweep.best, knobs_for(sweep.best.options)
    for turn, knob in enumerate(knobs):
        sweep.turn(knob, share=1 / (len(knobs) - turn + 1))
    ratio = sweep.final(start)
    sweep.pin_or_not(with_gaps)
    return Tuning(sweep.best.options, ratio, tuple(sweep.rows), onnxruntime().__version__)


GAP_S, GAPS_S, LONG_S = 1 / 30, 3.0, 0.02
"""A gap between calls, the time for calls with gaps, and how long calls are that hardly feel them."""

LEAST_GAPS = 12
"""The fewest gaps for each setting."""


@dataclasses.dataclass(frozen=True)
class _Subject:
    setting: str
    options: SessionOptions
    runner: OnnxRunner
    error: float
    seconds: float
    """What its latest call took."""


class _Sweep:
    """The best options so far, the outputs to keep to, the rows, and the time at which to end."""

    def __init__(
        self,
        model: bytes | Path,
        inputs: tuple[Array, ...],
        settings: Iterable[Setting],
        *,
        tolerance: float,
        end: float,
    ) -> None:
        """Begin with the fastest of these settings. Raises SessionError where none loads."""
        self._model, self._inputs, self._tolerance, self._end = model, inputs, tolerance, end
        self._reference: tuple[Array, ...] | None = None
        self.rows: list[Row] = []
        subjects = [subject for setting in settings if (subject := self._load(*setting))]
        if not subjects:
            reasons = "; ".join(f"{row.setting}: {row.reason}" for row in self.rows)
            raise SessionError(f"no provider loads the model: {reasons or 'none was named'}")
        self.best = subjects[0]
        times = self._measure(subjects, share=0.2 if len(subjects) > 1 else 0.05)
        self.rows.append(_row(subjects[0], "kept", "where the sweep starts", times[0], None))
        self._judge(subjects[0], subjects[1:], times)

    def turn(self, knob: Knob, share: float) -> None:
        """Try the settings of one knob on top of the best options, for a share of the time that is left."""
        settings = [(name, changed(self.best.options, change)) for name, change in knob.items()]
        if time.perf_counter() >= self._end:
            self.rows += [Row(name, options, "not tried", "out of time") for name, options in settings]
            return
        before = self.best
        subjects = [subject for setting in settings if (subject := self._load(*setting))]
        if subjects:
            self._judge(before, subjects, self._measure([before, *subjects], share))

    def final(self, start: _Subject) -> float:
        """Measure the best against the start once more; if it is slower after all, go back to the start."""
        if self.best is start:
            return 1.0
        found = gain(*self._measure([start, self.best], share=1.0))
        if found.high < 1:
            self.best = start
            return 1.0
        return found.ratio

    def pin_or_not(self, seconds: float) -> None:
        """Pin the threads, or not, if a call after a gap is faster so, and one back to back is not slower."""
        before = self.best
        few = seconds < 3 * LEAST_GAPS * (GAP_S + before.seconds)
        if not cores_to_pin(before.options) or before.seconds > LONG_S or few:
            return
        options = dataclasses.replace(before.options, pinned=not before.options.pinned)
        other = self._load("pinned" if options.pinned else "not pinned", options)
        if other is None:
            return
        calls = [functools.partial(subject.runner, *self._inputs) for subject in (before, other)]
        close = interleave(
            {str(place): latency(call) for place, call in enumerate(calls)}, seconds=seconds / 4
        )
        if (found := gain(*close.values())).is_loss:
            row = _row(other, "not faster", "slower back to back", close["1"], found)
            self.rows.append(row)
            return
        gaps = {str(place): rested(latency(call, long_s=0.0), GAP_S) for place, call in enumerate(calls)}
        times = interleave(gaps, seconds=seconds * 3 / 4, least=LEAST_GAPS)
        self._judge(before, [other], list(times.values()))

    def _load(self, setting: str, options: SessionOptions) -> _Subject | None:
        try:
            runner = OnnxRunner(self._model, options)
            runner(*self._inputs)
            start = time.perf_counter()
            outputs = runner(*self._inputs)  # the first run of a CUDA graph captures; this one replays
            seconds = time.perf_counter() - start
        except SessionError as e:
            self.rows.append(Row(setting, options, "failed", str(e)))
            return None
        if self._reference is None:
            self._reference = outputs
        error = max(map(relative_error, outputs, self._reference), default=0.0)
        if not error <= self._tolerance:
            reason = f"outputs have a relative error of {error:.2g}, more than {self._tolerance:.2g}"
            self.rows.append(Row(setting, options, "wrong", reason, error=error))
            return None
        return _Subject(setting, options, runner, error, seconds)

    def _measure(self, subjects: Sequence[_Subject], share: float) -> list[Measurement]:
        """The calls of each subject, taken in turn for a share of the time that is left."""
        calls = [functools.partial(subject.runner, *self._inputs) for subject in subjects]
        samplers = {
            str(place): latency(call, last_s=subject.seconds)
            for place, (call, subject) in enumerate(zip(calls, subjects, strict=True))
        }
        seconds = share * max(0.0, self._end - time.perf_counter())
        return list(interleave(samplers, seconds=seconds, warm_up=False).values())  # `_load` has run them

    def _judge(self, before: _Subject, subjects: Sequence[_Subject], times: Sequence[Measurement]) -> None:
        """Keep the fastest of `subjects` if it beats `before`; `times` are of both, in this order."""
        gains = [gain(times[0], after) for after in times[1:]]
        judged = list(zip(subjects, times[1:], gains, strict=True))
        faster = [(subject, after) for subject, after, found in judged if found.is_real]
        winner, _ = min(faster, key=lambda each: each[1].median, default=(None, None))
        for subject, after, found in judged:
            outcome: Outcome = "not faster"
            reason = "the gain is not outside the noise"
            if subject is winner:
                outcome, reason = "kept", "faster outside the noise"
            elif found.is_real:
                reason = "another setting is faster still"
            self.rows.append(_row(subject, outcome, reason, after, found))
        self.best = winner or before


def _row(subject: _Subject, outcome: Outcome, reason: str, timed: Measurement, found: Gain | None) -> Row:
    ratio, low, high = (found.ratio, found.low, found.high) if found else (None, None, None)
    p99 = timed.quantile(0.99)
    return Row(
        subject.setting,
        subject.options,
        outcome,
        reason,
        1e3 * timed.median,
        None if p99 is None else 1e3 * p99,
        ratio,
        low,
        high,
        subject.error,
    )
