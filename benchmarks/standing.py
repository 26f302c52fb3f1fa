"""How ampopt stands in a race: the best peer of each network and regime, and what may be claimed of it all.

What is claimed is the less favourable regime's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from benchmarks.regimes import BACK_TO_BACK, REGIMES, speedup
from benchmarks.results_files import Row, exact_enough, geometric_mean

EAGER = {"fp32": ("eager",), "amp": ("eager fp16 autocast", "eager bf16 autocast")}
"""Whose error is the yardstick of a lane."""

Table = tuple[str, str, int | None]
"""Lane, what goes in and comes out, and number of threads."""


def table_of(row: Row) -> Table:
    """The table that a row belongs to."""
    return row["lane"], row["io"], row["threads"]


def name_of(table: Table) -> str:
    """How a table is called."""
    lane, io, threads = table
    border = "the lane's dtype in and out" if io == "lane" else "FP32 in and out"
    count = "" if threads is None else f", {threads} {'thread' if threads == 1 else 'threads'}"
    return f"{lane} lane, {border}{count}"


def p50(row: Row, name: str, regime: str) -> float | None:
    """A contestant's median latency in a regime in ms; None where it did not run."""
    found = row["contestants"].get(name, {}).get(regime)
    return None if found is None else float(found["p50_ms"])


def ours(row: Row, regime: str) -> float | None:
    """ampopt's median latency in ms; None where it did not run."""
    return p50(row, f"ampopt {row['lane']}", regime)


def eager_error(row: Row) -> float | None:
    """The error of the original in eager, in the row's lane; None where it did not run."""
    found = (row["contestants"].get(name, {}).get("relative_error") for name in EAGER[row["lane"]])
    return next((error for error in found if error is not None), None)


def best_peer(row: Row, regime: str) -> tuple[str, float] | None:
    """The fastest contestant that is not ampopt and is exact enough, and its median latency in ms."""
    yardstick = eager_error(row)
    peers = {
        name: float(each[regime]["p50_ms"])
        for name, each in row["contestants"].items()
        if regime in each
        and not name.startswith("ampopt")
        and exact_enough(each.get("relative_error"), yardstick)
    }
    return min(peers.items(), key=lambda item: item[1]) if peers else None


@dataclasses.dataclass(frozen=True)
class Lead:
    """The best peer's time over ampopt's on one network in one regime, with the interval of the blocks."""

    network: str
    regime: str
    peer: str
    peer_ms: float
    ours_ms: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """How many times ampopt's time the best peer takes."""
        return self.peer_ms / self.ours_ms


def lead(row: Row, regime: str) -> Lead | None:
    """How a network stands in a regime; None where ampopt or every peer did not run."""
    peer, mine = best_peer(row, regime), ours(row, regime)
    if peer is None or mine is None:
        return None
    contestants = row["contestants"]
    found = speedup(contestants[peer[0]][regime], contestants[f"ampopt {row['lane']}"][regime])
    return Lead(row["network"], regime, *peer, mine, found.low, found.high)


def cpu_times(rows: Sequence[Row]) -> dict[str, float]:
    """The least CPU time of a call that a peer takes, over ampopt's, back to back, by network.

    Of one thread it is steady where other load on the machine disturbs latencies.
    """
    found: dict[str, float] = {}
    for row in rows:
        yardstick = eager_error(row)
        times = {
            name: float(each[BACK_TO_BACK]["cpu_ms"])
            for name, each in row["contestants"].items()
            if "cpu_ms" in each.get(BACK_TO_BACK, {}) and exact_enough(each.get("relative_error"), yardstick)
        }
        mine = times.get(f"ampopt {row['lane']}")
        peers = [ms for name, ms in times.items() if not name.startswith("ampopt")]
        if mine is not None and peers:
            found[row["network"]] = min(peers) / mine
    return found


def worst(leads: Iterable[Lead]) -> Lead:
    """The least of them."""
    return min(leads, key=lambda each: each.ratio)


@dataclasses.dataclass(frozen=True)
class Standing:
    """All leads of a table."""

    table: Table
    leads: tuple[Lead, ...]

    def mean(self, regime: str) -> float:
        """The geometric mean over the networks in a regime."""
        return geometric_mean([each.ratio for each in self.leads if each.regime == regime])

    def worst(self, regime: str) -> Lead:
        """The network on which ampopt stands worst in a regime."""
        return worst(each for each in self.leads if each.regime == regime)

    @property
    def less_favourable(self) -> str:
        """The regime in which the geometric mean is less."""
        return min(REGIMES, key=self.mean)

    def claim(self) -> str:
        """What may be said of the table: geometric mean and worst network, each of its worse regime."""
        regime, least = self.less_favourable, worst(self.leads)
        return (
            f"{name_of(self.table)}: the best peer takes {self.mean(regime):.2f} times ampopt's time in "
            f"geometric mean ({regime}, the less favourable regime) and at least {least.ratio:.2f} times "
            f"({least.network}, {least.regime}), over {len(self.leads) // len(REGIMES)} networks"
        )


def standings(rows: Sequence[Row]) -> list[Standing]:
    """The standing in every table in which ampopt and a peer ran, in both regimes."""
    found: dict[Table, list[Lead]] = {}
    for row in rows:
        both = [each for regime in REGIMES if (each := lead(row, regime)) is not None]
        if len(both) == len(REGIMES):
            found.setdefault(table_of(row), []).extend(both)
    return [Standing(table, tuple(leads)) for table, leads in found.items()]
