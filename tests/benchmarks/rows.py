"""Rows of results for tests of the tables."""

from __future__ import annotations

from typing import Any

from benchmarks.regimes import AT_30_HZ, BACK_TO_BACK

ROUNDS = 6


def timed(ms: float) -> dict[str, Any]:
    """What a regime's summary says of calls that all take as long."""
    return {
        "p50_ms": ms,
        "p90_ms": ms,
        "p99_ms": ms,
        "spread": 0.0,
        "samples": 60,
        "blocks_ms": [ms] * ROUNDS,
    }


def contestant(back_to_back: float, at_30_hz: float | None = None, **facts: Any) -> dict[str, Any]:
    """A contestant that ran, in ms; at 30 Hz as long, if nothing else is said."""
    times = {BACK_TO_BACK: timed(back_to_back), AT_30_HZ: timed(at_30_hz or back_to_back)}
    return {"prepare_s": 1.0, "relative_error": 1e-6, "bytes": 2**20, **facts, **times}


def race_row(network: str, lane: str = "fp32", io: str = "fp32", **contestants: Any) -> dict[str, Any]:
    """A row of the race: numbers are ms, texts are failures; `ours` is ampopt."""
    found: dict[str, Any] = {}
    for key, value in contestants.items():
        name = f"ampopt {lane}" if key == "ours" else key
        made = contestant(value) if isinstance(value, float) else value
        found[name] = {"lane": lane} | ({"error": made} if isinstance(made, str) else made)
    facts = {"environment": {"device": "d"}, "commit": "c", "contestants": found}
    return {"network": network, "lane": lane, "io": io, "threads": None, "load": [0.5, None], **facts}


def cold_row(network: str, **contestants: dict[str, Any]) -> dict[str, Any]:
    """A row of a cold default call; names have underscores in place of blanks."""
    return {
        "network": network,
        "commit": "c",
        "environment": {"device": "d"},
        "chosen": "amp",
        "judged": ["fp32", "amp"],
        "passes": [],
        "notes": [],
        "load": 0.5,
        "prepare_s": 12.0,
        "peak_host_bytes": 2**30,
        "peak_device_bytes": None,
        "contestants": {name.replace("_", " "): each for name, each in contestants.items()},
    }
