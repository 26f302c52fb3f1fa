"""The table and the chart of the race, made from its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_files import beyond_replays, geometric_mean, heading

Row = dict[str, Any]

LANES = ("fp32", "amp")


EAGER = {"fp32": ("eager",), "amp": ("eager fp16 autocast", "eager bf16 autocast")}
"""Whose error is the yardstick of a lane."""


def to_markdown(rows: Sequence[Row]) -> str:
    """Lane by lane the best peer against ampopt, latencies, preparation, errors, memory; then what failed."""
    parts = [
        *heading("The race", rows),
        "TF32 is off in the FP32 lane. Contestants in processes of their own, sampled in turn on the same",
        "inputs; all take float32 and give float32 that stays the caller's.",
        "",
    ]
    for lane in LANES:
        running = [row for row in rows if any(each["lane"] == lane for each in row["contestants"].values())]
        if running:
            parts += _lane(running, lane)
    return "\n".join([*parts, "## Not run", "", *_failures(rows)]) + "\n"


def _lane(rows: Sequence[Row], lane: str) -> list[str]:
    shown: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("Median latency of one synchronised call, ms (p99)", _latency),
        ("Time to prepare, s", lambda row: f"{row['prepare_s']:.1f}"),
        ("Relative error against float64", lambda row: f"{row['relative_error']:.1e}"),
        ("Memory taken, MiB", lambda row: f"{row['bytes'] / 2**20:.0f}" if "bytes" in row else "–"),
    )
    lines = [f"## {lane} lane", "", *summary(rows, lane)]
    for title, show in shown:
        lines += [f"### {title}", "", *_table(rows, lane, show), ""]
    return lines


def _table(rows: Sequence[Row], lane: str, show: Callable[[Row], str]) -> list[str]:
    found = [(name, each) for row in rows for name, each in row["contestants"].items()]
    names = list(dict.fromkeys(name for name, each in found if each["lane"] == lane))
    ran = [name for name in names if any("p50_ms" in row["contestants"].get(name, {}) for row in rows)]
    lines = ["| network | " + " | ".join(ran) + " |", "|---" * (len(ran) + 1) + "|"]
    for row in rows:
        these = (row["contestants"].get(name, {}) for name in ran)
        cells = [show(each) if "p50_ms" in each else "failed" if "error" in each else "–" for each in these]
        lines.append(f"| {row['network']} | " + " | ".join(cells) + " |")
    return lines


def _latency(row: Row) -> str:
    p99 = "" if row["p99_ms"] is None else f" ({row['p99_ms']:.2f})"
    return f"{row['p50_ms']:.3f}{p99}"


def _failures(rows: Sequence[Row]) -> list[str]:
    """Who did not run and why, with the networks that this is so of."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, each in row["contestants"].items():
            if "error" in each:
                reason = str(each["error"]).strip().splitlines()[0][:300]
                where.setdefault((name, reason), []).append(row["network"])
    lines = [f"- {name}: {reason} ({', '.join(networks)})" for (name, reason), networks in where.items()]
    return lines or ["- none: everybody ran everywhere"]


def best_peer(row: Row, lane: str) -> tuple[str, float] | None:
    """The fastest contestant of a lane that is not ampopt, and its median latency in ms."""
    peers = {
        name: float(each["p50_ms"])
        for name, each in row["contestants"].items()
        if each["lane"] == lane and "p50_ms" in each and not name.startswith("ampopt")
    }
    return min(peers.items(), key=lambda item: item[1]) if peers else None


def ours(row: Row, lane: str) -> float | None:
    """ampopt's median latency in a lane in ms; None where it did not run."""
    found = row["contestants"].get(f"ampopt {lane}", {}).get("p50_ms")
    return None if found is None else float(found)


_SUMMARY = (
    *("network", "best peer", "its ms", "ampopt ms", "best peer / ampopt", "ampopt's error / eager's"),
    *("a call beyond its replay, µs", "commit"),
)


def summary(rows: Sequence[Row], lane: str) -> list[str]:
    """How ampopt stands against the best peer of a lane on each network; the geometric mean last."""
    lines, ratios, beyond = list[str](), dict[str, float](), list[float]()
    for row in rows:
        peer, mine = best_peer(row, lane), ours(row, lane)
        if peer is None or mine is None:
            continue
        ratios[row["network"]] = ratio = peer[1] / mine
        times = (f"{peer[1]:.3f}", f"{mine:.3f}", f"{ratio:.3f}")
        facts = row["contestants"][f"ampopt {lane}"]
        us = facts.get("beyond_replay_us")
        beyond += [] if us is None else [us]
        shown = "–" if us is None else f"{us:.1f}"
        cells = (row["network"], peer[0], *times, _errors(row, lane), shown, facts["commit"])
        lines.append("| " + " | ".join(cells) + " |")
    if not ratios:
        return []
    worst = min(ratios, key=ratios.__getitem__)
    return [
        "### The best peer against ampopt",
        "",
        "| " + " | ".join(_SUMMARY) + " |",
        "|---" * len(_SUMMARY) + "|",
        *lines,
        "",
        f"- geometric mean {geometric_mean(list(ratios.values())):.3f}, "
        f"least {ratios[worst]:.3f} ({worst}), over {len(ratios)} networks",
        *([beyond_replays(beyond)] if beyond else []),
        "",
    ]


def _errors(row: Row, lane: str) -> str:
    """ampopt's error over that of the original in eager."""
    mine = row["contestants"][f"ampopt {lane}"]["relative_error"]
    eager = [row["contestants"].get(name, {}).get("relative_error") for name in EAGER[lane]]
    return next((f"{mine / error:.2f}" for error in eager if error), "–")


def draw(rows: Sequence[Row], path: Path) -> None:
    """A chart of speed: for each network and lane the latency of every contestant over ampopt's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lanes = [lane for lane in LANES if any(ours(row, lane) is not None for row in rows)]
    size = (2 + 7 * max(1, len(lanes)), 1.8 + 0.4 * len(rows))
    figure, axes = plt.subplots(1, max(1, len(lanes)), figsize=size, squeeze=False)
    for axis, lane in zip(axes[0], lanes, strict=False):
        names = list(
            dict.fromkeys(n for r in rows for n, each in r["contestants"].items() if each["lane"] == lane)
        )
        for name in names:
            points = [
                (each["p50_ms"] / mine, index)
                for index, row in enumerate(rows)
                if "p50_ms" in (each := row["contestants"].get(name, {}))
                and (mine := ours(row, lane)) is not None
            ]
            if points:
                style = {"marker": "D", "s": 45, "color": "black"} if name.startswith("ampopt") else {}
                axis.scatter(*zip(*points, strict=True), label=name, **style)
                axis.legend(fontsize=7)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yticks(range(len(rows)), [row["network"] for row in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)  # the first on top
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(f"{lane} lane")
        axis.set_xlabel("latency / ampopt's latency: right of 1 is slower than ampopt")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
