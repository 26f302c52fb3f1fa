"""What the tables of all benchmarks show of default calls in cold processes, see `benchmarks.cold_start`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.regimes import REGIMES

Row = dict[str, Any]

OURS, EAGER, EAGER_AMP, BY_HAND, COMPILED, AUTOTUNED = (
    *("ampopt", "eager fp32", "eager amp", "recipe by hand"),
    *("torch.compile", "torch.compile max-autotune"),
)
"""Who is timed in a cold process."""


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The default calls that rows of a benchmark have, as lines of a list; none where no row has one."""
    found = [row["default_call"] for row in rows if "default_call" in row]
    if not found:
        return []
    return ["", "Default calls, `ampopt.optimize(model, x)`, in cold processes with empty caches:", ""] + [
        f"- {each['network']}: {_said(each)}; commit {each['commit']}" for each in found
    ]


def _said(row: Row) -> str:
    if "contestants" not in row:
        return str(row.get("error") or row.get("skipped"))
    shown = ((regime, *(_ms(row, name, regime) for name in (OURS, EAGER, BY_HAND))) for regime in REGIMES)
    times = (f"{regime} {mine} ms (eager {eager}, by hand {hand})" for regime, mine, eager, hand in shown)
    return f"{row['chosen']} lane after {row['prepare_s']:.1f} s: {', '.join(times)}"


def _ms(row: Row, name: str, regime: str) -> str:
    value = p50(row, name, regime)
    return "–" if value is None else f"{value:.3f}"


def p50(row: Row, name: str, regime: str) -> float | None:
    """A contestant's median latency in a regime in ms; None where it did not run."""
    found = row.get("contestants", {}).get(name, {}).get(regime)
    return None if found is None else float(found["p50_ms"])
