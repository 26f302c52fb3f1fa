"""What changed between two runs of `compare`: an earlier one's JSON, and the present one's.

A row is a pass in a lane and a mode. Its latencies then and now are independent samples, so each median has
an interval of its own, `SURE_MS` in the JSON. The interval of their ratio holds the true one with 95 %
confidence, for each of the two misses its median with 2.5 %. It says nothing of what makes a whole run
slower, such as another load of the machine: the report shows both environments.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ampopt.errors import InputError

SURE_MS = "sure_ms"
"""The key of an interval that misses the median latency, in ms, with at most `MISS`."""

MISS = 0.025

Outcome = Literal["slower", "faster", "no difference", "fails now", "only then", "only now"]


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


@dataclasses.dataclass(frozen=True)
class Changes:
    """The rows of two runs, and what differs between their environments.

    A row is slower, or faster, where its whole interval is beyond `threshold`, a factor of 1 or more. The
    gate is closed by rows that are slower, and by those that were measured then and fail now.
    """

    rows: tuple[Change, ...]
    threshold: float
    environment: tuple[tuple[str, str, str], ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The rows that close the gate."""
        return tuple(row for row in self.rows if row.outcome in ("slower", "fails now"))

    @property
    def compared(self) -> tuple[Change, ...]:
        """The rows that were measured then, and now were measured or failed: without any there is no gate."""
        return tuple(row for row in self.rows if row.ratio is not None or row.outcome == "fails now")

    def to_dict(self) -> dict[str, Any]:
        """The changes as JSON data."""
        return {
            "threshold": self.threshold,
            "passed": bool(self.compared) and not self.regressions,
            "environment": [{"name": n, "then": then, "now": now} for n, then, now in self.environment],
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }


def read_baseline(path: Path) -> dict[str, Any]:
    """The JSON of an earlier `compare`.

    Raises InputError if it cannot be read, is something else, or has nothing to compare with.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise InputError(f"--baseline: there is no file {path}") from e
    except OSError as e:
        raise InputError(f"--baseline {path} cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise InputError(f"--baseline {path} is no JSON ({e}): give the one that --json wrote") from e
    if not _is_comparison(found):
        raise InputError(
            f"--baseline {path} is no comparison: give what `ampopt compare --json` or `--report x.json` of "
            "this version wrote"
        )
    if not any(row.get("latency") for row in found["rows"]):
        raise InputError(f"--baseline {path} has no row that was measured: make it anew, with more --budget")
    return dict(found)


def check_model(then: Mapping[str, Any], model: str) -> None:
    """Raise InputError if a baseline is of another model."""
    if then["model"] != model:
        raise InputError(f"the baseline is of the model {then['model']}, and this is {model}")


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
    check_model(then, now["model"])
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
    )


def _change(
    key: tuple[str, str, str], then: Mapping[str, Any] | None, now: Mapping[str, Any] | None, threshold: float
) -> Change | None:
    """A row that was measured at least once."""
    before, after = ((row or {}).get("latency") for row in (then, now))
    if before is None and after is None:
        return None
    if before is None or after is None:
        reason = str(((now if after is None else then) or {}).get("reason", "there is no such pass"))
        outcome: Outcome = "only now" if before is None else "only then"
        if after is None and reason.startswith("failed"):
            outcome = "fails now"
        return Change(*key, outcome, (before or {}).get("p50_ms"), (after or {}).get("p50_ms"), reason=reason)
    (then_low, then_high), (now_low, now_high) = before[SURE_MS], after[SURE_MS]
    low, high = now_low / then_high, now_high / then_low
    outcome = "slower" if low > threshold else "faster" if high < 1 / threshold else "no difference"
    then_ms, now_ms = before["p50_ms"], after["p50_ms"]
    return Change(*key, outcome, then_ms, now_ms, now_ms / then_ms, low, high)


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["lane"], row["mode"], row["name"]


def _is_comparison(found: Any) -> bool:
    """Whether JSON data has everything that is read from a baseline."""
    kinds = {"model": str, "inputs": list, "environment": dict, "rows": list}
    if not isinstance(found, dict) or not all(isinstance(found.get(n), kind) for n, kind in kinds.items()):
        return False
    texts = [*found["inputs"], *found["environment"].values()]
    return all(map(_is_row, found["rows"])) and all(isinstance(text, str) for text in texts)


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(n), str) for n in ("lane", "mode", "name")):
        return False
    timed = row.get("latency")
    if timed is None:
        return True
    ends = timed.get(SURE_MS) if isinstance(timed, dict) else None
    if not isinstance(ends, list) or len(ends) != 2:
        return False
    return all(_is_time(value) for value in (*ends, timed.get("p50_ms"))) and ends[0] <= ends[1]


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
