"""A default call in a cold process with empty caches, as a stranger makes it: every benchmark has its row.

`default_call` starts `benchmarks.cold_process`; `lines` shows what rows of any benchmark keep of it under
"default_call".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.race_protocol import emptied
from benchmarks.regimes import REGIMES
from benchmarks.results_files import Row, commit

MOST_S = 300.0
"""After which a cold process is ended."""

OURS, EAGER, EAGER_AMP, BY_HAND, COMPILED = (
    *("ampopt", "eager fp32", "eager amp"),
    *("recipe by hand", "compile reduce-overhead"),
)
"""Who is timed in a cold process."""


def default_call(
    network: str,
    device: torch.device,
    *,
    seconds: float = 0.0,
    compiled: bool = False,
    most_s: float = MOST_S,
) -> Row:
    """`ampopt.optimize(model, x)` in a cold process; `error` or `skipped` says why there are no figures.

    `seconds` of sampling follow, and at least a minimum; with `compiled`, `torch.compile` runs beside it.
    """
    row: Row = {"network": network, "commit": commit()}
    with tempfile.TemporaryDirectory(prefix="ampopt-cold-") as folder:
        file = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks.cold_process", network, str(device), str(file)]
        command += ["--seconds", str(seconds), *(["--compile"] * compiled)]
        try:
            done = subprocess.run(command, env=emptied(Path(folder), os.environ), timeout=most_s, check=False)
        except subprocess.TimeoutExpired:
            return {**row, "error": f"its process took longer than {most_s:.0f} s"}
        if not file.exists():
            return {**row, "error": f"its process ended with status {done.returncode}"}
        return {**row, **json.loads(file.read_text(encoding="utf-8"))}


def with_default_call(rows: Sequence[Row], network: str, device: torch.device) -> None:
    """Put a cold default call of this network into the first of a benchmark's new rows."""
    rows[0]["default_call"] = default_call(network, device)


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
