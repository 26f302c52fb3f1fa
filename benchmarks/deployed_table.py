"""The table of `benchmarks.deployed`: each way to run a network, and the leanest one beside ampopt's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.regimes import REGIMES
from benchmarks.results_files import Row, heading

HEAD = (
    *("network", "way", "first answer s", "kept MiB", "of it anonymous MiB", "at the most MiB"),
    *(f"{regime} ms" for regime in REGIMES),
    *("error", "commit"),
)

OURS = ("ampopt.robot", "ampopt.load", "ampopt.load again")


def to_markdown(rows: Sequence[Row]) -> str:
    """A line for each network and way, and how the memory of ampopt's compares."""
    lines = [
        *heading("Saved networks in new processes", rows),
        "Memory and the time to the first answer are counted from an interpreter that has imported NumPy.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---" * len(HEAD) + "|",
    ]
    for row in rows:
        for way, facts in row.get("ways", {}).items():
            if "error" not in facts:
                lines.append("| " + " | ".join((row["network"], way, *_cells(facts), row["commit"])) + " |")
    return "\n".join([*lines, "", *_compared(rows), *_said(rows)]) + "\n"


def kept(facts: Mapping[str, Any]) -> int:
    """Bytes that a way keeps after its warm-up."""
    return int(facts["resident_bytes"] - facts["bare_bytes"])


def _cells(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{facts['first_answer_s']:.2f}"
    yield from (_mib(bytes) for bytes in (kept(facts), facts["anonymous_bytes"]))
    yield _mib(facts["peak_bytes"] - facts["bare_bytes"])
    yield from (f"{facts[regime]['p50_ms']:.3f}" for regime in REGIMES)
    error = facts["relative_error"]
    yield "not finite" if error is None else f"{error:.1e}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}"


def _compared(rows: Sequence[Row]) -> Iterator[str]:
    """What `ampopt.robot` keeps for what the leanest other does, and `ampopt.load` for what eager does."""
    for row in rows:
        there = {way: kept(facts) for way, facts in row.get("ways", {}).items() if "error" not in facts}
        others = {way: size for way, size in there.items() if way not in OURS}
        if "ampopt.robot" in there and others:
            leanest = min(others, key=lambda way: others[way])
            ratio = there["ampopt.robot"] / others[leanest]
            yield f"- {row['network']}: ampopt.robot keeps {ratio:.2f} times the memory of {leanest}"
        if {"ampopt.load", "eager"} <= there.keys():
            more = _mib(there["ampopt.load"] - there["eager"])
            yield f"- {row['network']}: ampopt.load keeps {more} MiB more than eager"


def _said(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if "error" in row:
            yield f"- {row['network']}: {row['error']}"
        if "saved" in row:
            saved = row["saved"]
            took = f"{saved['chosen']} lane after {saved['prepare_s']:.1f} s, {', '.join(saved['passes'])}"
            yield f"- {row['network']}: the default call: {took}; saved in {saved['save_s']:.1f} s"
        for way, facts in row.get("ways", {}).items():
            if "error" in facts:
                yield f"- {row['network']}, {way}: {facts['error']}"
