"""Tells what a ledger holds: the cells of a row, and the results in sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ampopt.measure.entry import ORIGINAL, Entry, Timing
from ampopt.measure.headline import Load
from ampopt.measure.sampling import Gain, Measurement

if TYPE_CHECKING:
    from ampopt.measure.ledger import Ledger

CALLED_NOW = "as you call it now"
COLUMNS = ("lane", "pass", "verdict", "latency ms", "device ms", "gain", "error", "took", "why")


def interval(gain: Gain, digits: int = 2) -> str:
    """The ends of a gain's interval, rounded outwards to so many digits after the point."""
    steps = 10**digits
    low = math.floor(steps * gain.low + 1e-9) / steps
    high = math.ceil(steps * gain.high - 1e-9) / steps if math.isfinite(gain.high) else math.inf
    return f"{low:.{digits}f} to {high:.{digits}f}"


def told(gain: Gain, than: str, load: Load | None = None) -> str:
    """The statement that a gain over `than` supports; with the `load` if the machine was too busy."""
    measured = f"{gain.ratio:.2f}x in the median, {interval(gain)}"
    if gain.is_vague:
        why = "the machine is too busy" if load is not None and load.is_high else "the times vary too much"
        seen = "" if load is None else f"; {load}"
        what = "by how much" if gain.is_surely_faster else "whether"
        return f"{why} to tell {what} it is faster than {than} ({measured}{seen})"
    if gain.at_least > 1:
        return f"at least {gain.at_least:.2f}x faster than {than} ({measured})"
    return f"{'slower than' if gain.is_loss else 'no difference from'} {than} ({measured})"


def _milliseconds(before: float | None, after: float | None) -> str:
    return "–" if before is None or after is None else f"{1e3 * before:.3f} → {1e3 * after:.3f}"


def _clock(timing: Timing | None, clock: str) -> float | None:
    measured = getattr(timing, clock) if timing is not None else None
    return None if measured is None else float(measured.median)


def row(entry: Entry) -> tuple[str, ...]:
    """An entry's cells in the order of `COLUMNS`; times are medians before → after."""
    gain = "–" if entry.gain is None else f"{entry.gain.ratio:.2f}x"
    error = "–" if entry.error is None else f"{entry.error:.1e}"
    latency = _milliseconds(_clock(entry.before, "latency"), _clock(entry.after, "latency"))
    device = _milliseconds(_clock(entry.before, "device"), _clock(entry.after, "device"))
    count = f"{entry.rewrites} rewrites; " if entry.rewrites > 1 else ""
    more = f" (and {len(entry.hints) - 1} more)" if len(entry.hints) > 1 else ""
    hint = f"; {entry.hints[0]}{more}" if entry.hints else ""
    took, why = f"{entry.took_s:.1f} s", count + entry.reason + hint
    return entry.lane, entry.name, entry.verdict.value, latency, device, gain, error, took, why


def summary_lines(ledger: Ledger) -> list[str]:
    """The results in sentences: the choice first, then the baseline, each lane, and notes."""
    lines = [f"{ledger.model} on {ledger.environment.get('device', '?')}, inputs {', '.join(ledger.inputs)}"]
    if ledger.chosen == ORIGINAL:
        lines.append("result: the original model")
    elif ledger.chosen is not None and ledger.gain is not None:
        lines.append(f"result: {ledger.chosen} lane, {told(ledger.gain, CALLED_NOW, ledger.load)}")
    if ledger.baseline is not None:
        lines.append(f"{CALLED_NOW}: {1e3 * ledger.baseline.median:.3f} ms{_p99(ledger.baseline)}")
    for lane in ledger.lanes.values():
        mark = "→" if lane.lane == ledger.chosen else " "
        gain = "" if lane.gain is None else f", {told(lane.gain, 'eager', ledger.load)}"
        own = " from eager" if lane.eager_error is None else f", eager's {lane.eager_error:.1e}"
        lines.append(
            f"{mark} {lane.lane} ({lane.dtype}): eager {1e3 * lane.eager.median:.3f} ms, optimized "
            f"{1e3 * lane.best.median:.3f} ms{gain}; "
            f"error {lane.error:.1e}{own}"
        )
        whose = f"the {lane.answered_by} lane's program, which is faster: " if lane.answered_by else ""
        lines.append(f"    {whose}{' + '.join(lane.passes) or 'no pass helped'}")
        if lane.refused:
            lines.append(f"    REFUSED: {lane.refused}")
    if steps := ledger.steps_to_best():
        shown = ", ".join(f"{1e3 * step.latency_s:.3f} ms after {step.at_s:.1f} s" for step in steps)
        lines.append(f"best so far: {shown}")
    lines += [f"note: {note}" for note in ledger.notes]
    return [*lines, f"took {ledger.seconds:.1f} s"] if ledger.seconds else lines


def _p99(measured: Measurement) -> str:
    p99 = measured.quantile(0.99)
    return "" if p99 is None else f" (p99 {1e3 * p99:.3f} ms)"
