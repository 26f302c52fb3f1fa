"""The table of cold default calls, made from their rows, and who is behind the recipe by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.cold_lines import BY_HAND, EAGER, EAGER_AMP, OURS, p50
from benchmarks.race_networks import RACE
from benchmarks.regimes import REGIMES, speedup
from benchmarks.results_files import Row, exact_enough, geometric_mean, heading

METHOD = """
Each row is `ampopt.optimize(model, x)` with nothing else in a process of its own whose caches are all empty
(from ad107aa on, Python's compiled modules are there, as an installation leaves them).
Then all are timed in turn in that process, back to back and at 30 Hz with idle gaps: medians of synchronised
calls; each takes float32 and gives float32 that stays the caller's; cuDNN's search is on for all but ampopt.
By hand: on a GPU FP16, channels_last, folded, in a plain CUDA graph; on a CPU folded and channels_last.
""".strip()

HEAD = (
    *("network", "lane", "lanes judged", "error", "eager AMP's", "by hand's"),
    *("90 % of the gain after s", "prepared in s"),
    *(f"{regime}: eager FP32, AMP, by hand, **ampopt** ms" for regime in REGIMES),
    *(f"{regime}: eager FP32 / ampopt (interval)" for regime in REGIMES),
    *("by hand / ampopt, the less favourable", "peak host MiB", "peak device MiB", "commit"),
)


def to_markdown(rows: Sequence[Row]) -> str:
    """Every network's default call, what is behind the recipe by hand, notes, and what did not run."""
    ran = [row for row in rows if "contestants" in row]
    lines = [
        *heading("Default calls in cold processes", rows),
        METHOD,
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---" * len(HEAD) + "|",
        *("| " + " | ".join(_cells(row)) + " |" for row in ran),
        "",
        *standing(ran),
    ]
    for title, text in (("Notes of the reports", _notes(ran)), ("Not run", _not_run(rows))):
        lines += ["", f"## {title}", "", *(text or ["- none"])]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    three = (row["contestants"].get(name, {}) for name in (OURS, EAGER_AMP, BY_HAND))
    times = [
        ", ".join(_number(p50(row, name, regime), ".3f") for name in (EAGER, EAGER_AMP, BY_HAND, OURS))
        for regime in REGIMES
    ]
    worst = by_hand_ratio(row)
    memory = [
        "–" if row[key] is None else f"{row[key] / 2**20:.0f}"
        for key in ("peak_host_bytes", "peak_device_bytes")
    ]
    return [
        *(row["network"], row["chosen"], ", ".join(row["judged"])),
        *(_number(each.get("relative_error"), ".1e") for each in three),
        _number(seconds_to(row), ".1f"),
        f"{row['prepare_s']:.1f}",
        *times,
        *(_gain(row, regime) for regime in REGIMES),
        "–" if worst is None else f"{worst[0]:.2f} ({worst[1]})",
        *memory,
        row["commit"],
    ]


def seconds_to(row: Row, share: float = 0.9) -> float | None:
    """Seconds after which the search had this share of its final gain; None where nothing was faster."""
    if "report" not in row:
        return row.get("nearly_s")  # of a row that keeps no more
    steps = row["report"].get("best_so_far") or []
    return next((step["at_s"] for step in steps if share * step["ms"] <= steps[-1]["ms"]), None)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _gain(row: Row, regime: str) -> str:
    contestants = row["contestants"]
    if regime not in contestants.get(EAGER, {}):
        return "–"
    found = speedup(contestants[EAGER][regime], contestants[OURS][regime])
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def by_hand_ratio(row: Row) -> tuple[float, str] | None:
    """The recipe's time over ampopt's in the regime where it is least; None where the recipe is no answer."""
    recipe = row["contestants"].get(BY_HAND, {})
    error, amp = (row["contestants"].get(n, {}).get("relative_error") for n in (BY_HAND, EAGER_AMP))
    if not exact_enough(error, amp):
        return None
    ratios: list[tuple[float, str]] = []
    for regime in REGIMES:
        mine = p50(row, OURS, regime)
        if regime in recipe and mine is not None:
            ratios.append((recipe[regime]["p50_ms"] / mine, regime))
    return min(ratios, default=None)


def counts(row: Row) -> bool:
    """Whether the recipe keeps to the error that "auto" accepts: ampopt may not answer with more."""
    return exact_enough(row["contestants"][BY_HAND].get("relative_error"), None)


def standing(rows: Sequence[Row]) -> list[str]:
    """Geometric means in the less favourable regime, and the networks that are behind the recipe by hand."""
    lines: list[str] = []
    for title, name in (("eager FP32", EAGER), ("the recipe by hand", BY_HAND)):
        means = {regime: _mean(rows, name, regime) for regime in REGIMES}
        known = {regime: mean for regime, mean in means.items() if mean is not None}
        if known:
            least = min(known, key=lambda regime: known[regime])
            others = ", ".join(f"{regime} {mean:.2f}" for regime, mean in known.items())
            claim = f"geometric mean {known[least]:.2f} in the less favourable regime, {least} ({others})"
            lines.append(f"- {title} / ampopt: {claim}")
    found = [(row, ratio) for row in rows if (ratio := by_hand_ratio(row)) is not None]
    counted = [f"{row['network']} {r:.2f} ({regime})" for row, (r, regime) in found if r < 1 and counts(row)]
    beyond = [f"{row['network']} {r:.2f}" for row, (r, _) in found if not counts(row)]
    lines.append(
        f"- behind the recipe by hand: {', '.join(counted) or 'none'}, "
        f"of {len(found) - len(beyond)} where its error is within what a default call accepts"
    )
    if beyond:
        lines.append(f"- where it is not, by hand / ampopt: {', '.join(beyond)}")
    lanes = [row["chosen"] for row in rows]
    lines.append("- lanes: " + ", ".join(f"{lane} {lanes.count(lane)}" for lane in dict.fromkeys(lanes)))
    for title, is_there in (("of the race", True), ("that nobody tuned for", False)):
        them = [row for row in rows if (row["network"] in RACE) is is_there]
        soon = [after for row in them if (after := seconds_to(row)) is not None]
        if soon:
            end = statistics.median(row["prepare_s"] for row in them)
            text = f"90 % of the gain after {statistics.median(soon):.1f} s, the end after {end:.1f} s"
            lines.append(f"- median of {len(them)} networks {title}: {text}")
    lost = [row["network"] for row in rows if "amp" not in row["judged"]]
    lines.append(f"- the AMP lane was not judged on: {', '.join(lost) or 'none'}")
    return lines


def _mean(rows: Sequence[Row], name: str, regime: str) -> float | None:
    ratios = []
    for row in rows:
        theirs, mine = p50(row, name, regime), p50(row, OURS, regime)
        if name == BY_HAND and (by_hand_ratio(row) is None or not counts(row)):
            continue
        if theirs is not None and mine is not None and math.isfinite(theirs):
            ratios.append(theirs / mine)
    return geometric_mean(ratios) if ratios else None


def _notes(rows: Sequence[Row]) -> list[str]:
    return [f"- {row['network']}: {'; '.join(map(_one_line, row['notes']))}" for row in rows if row["notes"]]


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())


def _not_run(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"- {row['network']}: {_one_line(row.get('error') or row.get('skipped'))}"
        for row in rows
        if "contestants" not in row
    ]
    for row in rows:
        for name, each in row.get("contestants", {}).items():
            if "error" in each:
                lines.append(f"- {row['network']}, {name}: {_one_line(each['error'])}")
    return lines
