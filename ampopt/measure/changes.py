"""What changed between two runs of `compare`: an earlier one's JSON, and the present one's.

A row is a pass in a lane and a mode. Its latencies then and now are independent samples, so each median has
an interval of its own, `SURE_MS` in the JSON. The interval of their ratio holds the true one with 95 %
confidence, for each of the two misses its median with 2.5 %. It says nothing of what makes a whole run
slower, such as another load of the machine: the report shows both environments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ampopt.errors import InputError
from ampopt.measure.architecture import Architecture
from ampopt.measure.sampling import Gain

SURE_MS = "sure_ms"
"""The key of an interval that misses the median latency, in ms, with at most `MISS`."""

MISS = 0.025

WITHOUT = "(without it: "
"""The beginning of the reason in rows whose own program is right, and the one without the pass is not."""

Outcome = Literal["slower", "faster", "no difference", "fails now", "fails in both", "only then", "only now"]

State = Literal["right", "wrong", "failed", "not measured"]

INTERRUPTED = "not tried: interrupted"
"""The reason in rows that an interrupted run has not come to."""

INTERRUPTED_THEN = "interrupted"
"""The key that says whether Ctrl-C has ended a run before its time."""


def is_wrong(reason: str) -> bool:
    """Whether the reason of a row that was timed says that its program gives wrong results."""
    return bool(reason) and not reason.startswith(WITHOUT)


@dataclasses.dataclass(frozen=True)
class Change:
    """A row then and now: medians in ms, and how many times slower it is now, with an interval."""

    lane: str
    mode: str
    name: str
    outcome: Outcome
    then_ms: float | None
    now_ms: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    @property
    def times(self) -> Gain | None:
        """How many times slower it is now, as a ratio with its interval; None where it is not compared."""
        if self.ratio is None or self.low is None or self.high is None:
            return None
        return Gain(self.ratio, self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Changes:
    """The rows of two runs, and what differs between their environments.

    A row is slower, or faster, where its whole interval is beyond `threshold`, a factor of 1 or more. The
    gate is closed by rows that are slower, by those that were measured then and fail now: there is no
    program, or a wrong one, and by those that an interruption has left out. The time of a wrong program is
    compared with nothing. Rows that there was no time for now are told, and close nothing.
    """

    rows: tuple[Change, ...]
    threshold: float
    environment: tuple[tuple[str, str, str], ...]
    was_interrupted: bool = False
    """Whether the baseline is of a run that Ctrl-C has ended."""

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The rows that are slower, or fail now."""
        return tuple(row for row in self.rows if row.outcome in ("slower", "fails now"))

    @property
    def interrupted(self) -> tuple[Change, ...]:
        """The rows that were measured then, and that this run was interrupted before."""
        return tuple(row for row in self.missing if row.reason == INTERRUPTED)

    @property
    def missing(self) -> tuple[Change, ...]:
        """The rows that were measured then, and not now, whatever the reason."""
        return tuple(row for row in self.rows if row.outcome == "only then")

    @property
    def passed(self) -> bool:
        """Whether the gate is open."""
        return bool(self.compared) and not self.regressions and not self.interrupted

    @property
    def compared(self) -> tuple[Change, ...]:
        """The rows that were right then, and now are timed or fail: without any there is no gate."""
        return tuple(row for row in self.rows if row.ratio is not None or row.outcome == "fails now")

    def to_dict(self) -> dict[str, Any]:
        """The changes as JSON data."""
        return {
            "threshold": self.threshold,
            "passed": self.passed,
            "compared": len(self.compared),
            "not_compared": len(self.missing),
            "baseline_interrupted": self.was_interrupted,
            "environment": [{"name": n, "then": then, "now": now} for n, then, now in self.environment],
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }


def check_model(then: Mapping[str, Any], model: str, architecture: Architecture | None) -> None:
    """Raise InputError if a baseline is of another model: of another class, or architecture.

    Where one of the two is not known, as in baselines of earlier versions, the class alone decides.
    """
    if then["model"] != model:
        raise InputError(f"the baseline is of the model {then['model']}, and this is {model}")
    had = Architecture.read(then.get("architecture"))
    if had is None or architecture is None or had == architecture:
        return
    raise InputError(
        f"the baseline is of another {model}: "
        + (
            "the classes of its modules, or the names or shapes of its weights, are others"
            if str(had) == str(architecture)
            else f"it has {had}, and this one {architecture}"
        )
    )


def check_lanes(then: Mapping[str, Any], lanes: set[str]) -> None:
    """Raise InputError if a baseline has lanes that are not among these, and so nothing to be compared with.

    Further lanes are no difference: whether one can be tried is known only once it was.
    """
    had = {row["lane"] for row in then["rows"]}
    if not had <= lanes:
        names = " and ".join(", ".join(sorted(each)) or "none" for each in (had, lanes))
        raise InputError(f"the lanes of the baseline and of this run, {names}, differ: see --precision")


def check_inputs(then: Mapping[str, Any], inputs: Sequence[str]) -> None:
    """Raise InputError if a baseline has other shapes or dtypes; devices may differ."""
    shapes, own = (", ".join(text.partition(" on ")[0] for text in each) for each in (then["inputs"], inputs))
    if shapes != own:
        raise InputError(f"the baseline has the inputs {shapes}, and these are {own}")


def changes(then: Mapping[str, Any], now: Mapping[str, Any], threshold: float) -> Changes:
    """What changed between two comparisons, both as JSON data.

    Raises InputError that names what differs, if that is the model, the inputs but for devices, or a lane
    that is no longer there.
    """
    check_model(then, now["model"], Architecture.read(now.get("architecture")))
    check_inputs(then, now["inputs"])
    check_lanes(then, {row["lane"] for row in now["rows"]})
    earlier = {_key(row): row for row in then["rows"]}
    later = {_key(row): row for row in now["rows"]}
    rows = [_change(key, earlier.get(key), later.get(key), threshold) for key in {**later, **earlier}]
    names = {**then["environment"], **now["environment"]}
    values = [(n, then["environment"].get(n, "–"), now["environment"].get(n, "–")) for n in names]
    return Changes(
        tuple(row for row in rows if row is not None),
        threshold,
        tuple(value for value in values if value[1] != value[2]),
        _was_interrupted(then),
    )


def _was_interrupted(then: Mapping[str, Any]) -> bool:
    """Whether a baseline is of an interrupted run; those of earlier versions say so in their rows alone."""
    return bool(then.get(INTERRUPTED_THEN)) or any(row.get("reason") == INTERRUPTED for row in then["rows"])


def _change(
    key: tuple[str, str, str], then: Mapping[str, Any] | None, now: Mapping[str, Any] | None, threshold: float
) -> Change | None:
    """A row that was measured at least once."""
    before, after = ((row or {}).get("latency") or {} for row in (then, now))
    if not before and not after:
        return None
    states = state_of(then), state_of(now)
    if states != ("right", "right"):
        told = then if states[1] == "right" else now
        reason = str((told or {}).get("reason", "there is no such pass"))
        times = before.get("p50_ms"), after.get("p50_ms")
        return Change(*key, _not_compared(*states), *times, reason=reason)
    (then_low, then_high), (now_low, now_high) = before[SURE_MS], after[SURE_MS]
    low, high = now_low / then_high, now_high / then_low
    outcome: Outcome = "slower" if low > threshold else "faster" if high < 1 / threshold else "no difference"
    then_ms, now_ms = before["p50_ms"], after["p50_ms"]
    return Change(*key, outcome, then_ms, now_ms, now_ms / then_ms, low, high)


def state_of(row: Mapping[str, Any] | None) -> State:
    """What came of a row in a run."""
    reason = str((row or {}).get("reason", ""))
    if row is None or row.get("latency") is None:
        return "failed" if reason.startswith("failed") else "not measured"
    return "wrong" if is_wrong(reason) else "right"


def _not_compared(then: State, now: State) -> Outcome:
    """The outcome of a row that was not right in both runs."""
    if "not measured" in (then, now):
        return "only now" if then == "not measured" else "only then"
    if now == "right":
        return "only now"
    return "fails now" if then == "right" else "fails in both"


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["lane"], row["mode"], row["name"]
