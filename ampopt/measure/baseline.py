"""Reads the JSON of an earlier `compare`, and refuses one that is something else, or damaged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ampopt.errors import InputError
from ampopt.measure.architecture import Architecture
from ampopt.measure.changes import INTERRUPTED_THEN, SURE_MS, state_of

_QUANTILES = ("p50_ms", "p90_ms", "p99_ms")
"""Keys of times that do not fall from one to the next; those that too few samples give are null."""


def read_baseline(path: Path) -> dict[str, Any]:
    """The JSON of an earlier `compare`.

    Raises InputError if it cannot be read, is something else, has nothing to compare with, or has a row whose
    numbers cannot all be true, which is named with the field.
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
    if (damage := next(_damages(found["rows"]), None)) is not None:
        raise InputError(f"--baseline {path} is damaged: {damage}; make it anew")
    states = {state_of(row) for row in found["rows"]}
    if states.isdisjoint(("right", "wrong")):
        raise InputError(f"--baseline {path} has no row that was measured: make it anew, with more --budget")
    if "right" not in states:
        raise InputError(f"--baseline {path} has no row whose program was right: see its reasons")
    return dict(found)


def _is_comparison(found: Any) -> bool:
    """Whether JSON data has everything that is read from a baseline."""
    kinds = {"model": str, "inputs": list, "environment": dict, "rows": list}
    if not isinstance(found, dict) or not all(isinstance(found.get(n), kind) for n, kind in kinds.items()):
        return False
    if (known := found.get("architecture")) is not None and Architecture.read(known) is None:
        return False
    if not isinstance(found.get(INTERRUPTED_THEN, False), bool):
        return False
    texts = [*found["inputs"], *found["environment"].values()]
    return all(map(_is_row, found["rows"])) and all(isinstance(text, str) for text in texts)


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(n), str) for n in ("lane", "mode", "name")):
        return False
    timed = row.get("latency")
    if not isinstance(row.get("reason", ""), str) or not (timed is None or isinstance(timed, dict)):
        return False
    ends = None if timed is None else timed.get(SURE_MS)
    return timed is None or (isinstance(ends, list) and len(ends) == 2)


def _damages(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """What cannot be true of rows, with the row and the field."""
    seen = set[tuple[str, ...]]()
    for row in rows:
        key = row["lane"], row["mode"], row["name"]
        told = f"the row of {row['name']} ({row['lane']}, {row['mode']})"
        if key in seen:
            yield f"{told} is there twice"
        seen.add(key)
        if row.get("latency") is not None:
            yield from (f"in {told} {what}" for what in _wrong_times(row["latency"]))


def _wrong_times(timed: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be true of the times of a row, or of the number of its samples."""
    low, high = timed[SURE_MS]
    middle = timed.get("p50_ms")
    known = {name: timed[name] for name in _QUANTILES if timed.get(name) is not None}
    fields = [(SURE_MS, low), (SURE_MS, high), ("p50_ms", middle), *known.items()]
    for name, value in fields:
        if not _is_time(value):
            yield f"{name} has {_shown(value)}, which is no time"
            return
    if low > high:
        yield f"the ends of {SURE_MS}, {_shown(low)} and {_shown(high)}, are in the wrong order"
    elif not low <= middle <= high:
        yield f"p50_ms is {_shown(middle)}, outside its interval {SURE_MS}, {_shown(low)} to {_shown(high)}"
    if list(known.values()) != sorted(known.values()):
        yield f"{', '.join(known)} are {', '.join(map(_shown, known.values()))}, which fall"
    count, spread = timed.get("samples", 1), timed.get("spread", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        yield f"samples is {_shown(count)}, which is no number of samples"
    if spread != 0 and not _is_time(spread):
        yield f"spread is {_shown(spread)}, which is none"


def _shown(value: object) -> str:
    return repr(value)[:40]


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max
