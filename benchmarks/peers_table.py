"""The table and the chart of the race, made from its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cold_lines
from benchmarks.regimes import AT_30_HZ, BACK_TO_BACK, REGIMES
from benchmarks.results_files import Row, beyond_replays, geometric_mean, heading
from benchmarks.standing import (
    Standing,
    Table,
    cpu_times,
    eager_error,
    lead,
    name_of,
    ours,
    standings,
    table_of,
    worst,
)

METHOD = """
Contestants run in processes of their own and are timed in turn, a block of calls each, in random order: back
to back, and at 30 Hz with idle gaps between the frames. Figures are medians of synchronised calls; what is
claimed is the less favourable regime's. Every peer is the fastest of the ways in which it was tried (below),
with `cudnn.benchmark` on; TF32 is off in the FP32 lane. Results of CUDA graphs stay in buffers that the next
call overwrites, those of peers and of ampopt (`outputs="static"`; "copied" is `outputs="copy"`). A peer whose
error is beyond 1e-2, and twice eager's in the same lane, is shown but is no best peer.
""".strip()

Show = Callable[[Row], str]


def to_markdown(rows: Sequence[Row]) -> str:
    """What may be claimed; table by table how ampopt stands, latencies, what else was read; what failed."""
    found = standings(rows)
    parts = [*heading("The race", rows), METHOD, "", *(f"- {each.claim()}" for each in found), ""]
    for table in dict.fromkeys(map(table_of, rows)):
        own = [row for row in rows if table_of(row) == table]
        parts += _section(table, own, next((each for each in found if each.table == table), None))
    parts += ["## Not run", "", *_failures(rows), *cold_lines.lines(rows)]
    return "\n".join(parts) + "\n"


def _section(table: Table, rows: Sequence[Row], standing: Standing | None) -> list[str]:
    shown: list[tuple[str, Show]] = [
        *((f"{regime}: median latency, ms (p99)", _latency(regime)) for regime in REGIMES),
        ("Calls queued without waiting for each, ms a call", _read(BACK_TO_BACK, "queued_ms", ".3f")),
        ("CPU time of a call back to back, all threads, ms", _read(BACK_TO_BACK, "cpu_ms", ".3f")),
        (
            "CPU time of a frame at 30 Hz, all threads, with the gap before it, ms",
            _read(AT_30_HZ, "cpu_ms", ".3f"),
        ),
        ("The way that was fastest", lambda each: each.get("way") or "–"),
        ("Time to prepare, all ways, s", lambda each: f"{each['prepare_s']:.1f}"),
        ("Relative error against float64", lambda each: _number(each.get("relative_error"), ".1e")),
        ("Memory taken at the most, MiB", _memory("bytes")),
        ("Memory kept after preparing, MiB", _memory("kept_bytes")),
    ]
    for regime in REGIMES:
        for key, title in (
            ("energy_mj", "energy, mJ a frame"),
            ("power_w", "power, W"),
            ("sm_mhz", "clock, MHz"),
        ):
            shown.append((f"{regime}: {title}", _read(regime, key, ".0f")))
    lines = [f"## {name_of(table)}", ""]
    if standing is not None:
        lines += summary(rows, standing)
    for title, show in shown:
        cells = _table(rows, show)
        if cells:
            lines += [f"### {title}", "", *cells, ""]
    return lines


def _memory(key: str) -> Show:
    """On a GPU that of the device, on a CPU the process's own, beyond what it had before."""
    return lambda each: f"{each[key] / 2**20:.0f}" if key in each else "–"


def _table(rows: Sequence[Row], show: Show) -> list[str]:
    """A line for each network; none where nobody has anything to show."""
    names = list(dict.fromkeys(name for row in rows for name in row["contestants"]))
    ran = [name for name in names if any(BACK_TO_BACK in row["contestants"].get(name, {}) for row in rows)]
    lines = ["| network | " + " | ".join(ran) + " |", "|---" * (len(ran) + 1) + "|"]
    anything = False
    for row in rows:
        cells = []
        for name in ran:
            each = row["contestants"].get(name, {})
            cells.append(show(each) if BACK_TO_BACK in each else "failed" if "error" in each else "–")
            anything |= cells[-1] not in ("–", "failed")
        lines.append(f"| {row['network']} | " + " | ".join(cells) + " |")
    return lines if anything else []


def _latency(regime: str) -> Show:
    def show(each: Row) -> str:
        found: dict[str, Any] = each[regime]
        p99 = "" if found["p99_ms"] is None else f" ({found['p99_ms']:.2f})"
        return f"{found['p50_ms']:.3f}{p99}"

    return show


def _read(regime: str, key: str, form: str) -> Show:
    return lambda each: _number(each[regime].get(key), form)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _failures(rows: Sequence[Row]) -> list[str]:
    """Who did not run and why, with the networks that this is so of."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, each in row["contestants"].items():
            if "error" in each:
                reason = str(each["error"]).strip().splitlines()[0][:300]
                where.setdefault((name, reason), []).append(row["network"])
    lines = [
        f"- {name}: {reason} ({', '.join(dict.fromkeys(networks))})"
        for (name, reason), networks in where.items()
    ]
    return lines or ["- none: everybody ran everywhere"]


_SUMMARY = (
    "network",
    *(
        f"{regime}: {what}"
        for regime in REGIMES
        for what in ("best peer, ms", "ampopt ms", "ratio (interval)")
    ),
    *("the less favourable", "ampopt's error / eager's", "a call beyond its replay, µs"),
    *("host load before and after", "commit"),
)


def summary(rows: Sequence[Row], standing: Standing) -> list[str]:
    """How ampopt stands on each network in both regimes; geometric means and the worst network last."""
    lines, beyond = list[str](), list[float]()
    for row in rows:
        leads = [each for regime in REGIMES if (each := lead(row, regime)) is not None]
        if len(leads) < len(REGIMES):
            continue
        us = row["contestants"][f"ampopt {row['lane']}"].get("beyond_replay_us")
        beyond += [] if us is None else [us]
        cells = [row["network"]]
        for each in leads:
            interval = f"{each.ratio:.2f} ({each.low:.2f} to {each.high:.2f})"
            cells += [f"{each.peer} {each.peer_ms:.3f}", f"{each.ours_ms:.3f}", interval]
        least = worst(leads)
        load = ", ".join(_number(each, ".1f") for each in row["load"])
        cells += [
            f"{least.ratio:.2f} ({least.regime})",
            _errors(row),
            _number(us, ".1f"),
            load,
            row["commit"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    means = [
        f"- {regime}: geometric mean {standing.mean(regime):.3f}, least {standing.worst(regime).ratio:.3f} "
        f"({standing.worst(regime).network})"
        for regime in REGIMES
    ]
    return [
        "### The best peer against ampopt",
        "",
        "| " + " | ".join(_SUMMARY) + " |",
        "|---" * len(_SUMMARY) + "|",
        *lines,
        "",
        *means,
        *_cpu_times(rows),
        *([beyond_replays(beyond)] if beyond else []),
        "",
    ]


def _cpu_times(rows: Sequence[Row]) -> list[str]:
    """What the CPU time says, where the processor is what computes."""
    ratios = cpu_times([row for row in rows if "instructions" in row["environment"]])
    if not ratios:
        return []
    least = min(ratios, key=ratios.__getitem__)
    mean = geometric_mean(list(ratios.values()))
    return [f"- CPU time back to back: geometric mean {mean:.3f}, least {ratios[least]:.3f} ({least})"]


def _errors(row: Row) -> str:
    """ampopt's error over that of the original in eager."""
    mine, eager = row["contestants"][f"ampopt {row['lane']}"].get("relative_error"), eager_error(row)
    return f"{mine / eager:.2f}" if mine is not None and eager else "–"


def draw(rows: Sequence[Row], path: Path) -> None:
    """A chart of speed: for each table the latency of every contestant over ampopt's, in the worse regime."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = standings(rows)
    size = (2 + 7 * max(1, len(found)), 1.8 + 0.4 * len(rows))
    figure, axes = plt.subplots(1, max(1, len(found)), figsize=size, squeeze=False)
    for axis, standing in zip(axes[0], found, strict=False):
        own, regime = [r for r in rows if table_of(r) == standing.table], standing.less_favourable
        for name in dict.fromkeys(name for row in own for name in row["contestants"]):
            points = [
                (each[regime]["p50_ms"] / mine, index)
                for index, row in enumerate(own)
                if regime in (each := row["contestants"].get(name, {}))
                and (mine := ours(row, regime)) is not None
            ]
            if points:
                style = {"marker": "D", "s": 45, "color": "black"} if name.startswith("ampopt") else {}
                axis.scatter(*zip(*points, strict=True), label=name, **style)
                axis.legend(fontsize=7)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yticks(range(len(own)), [row["network"] for row in own])
        axis.set_ylim(len(own) - 0.5, -0.5)  # the first on top
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(f"{name_of(standing.table)}, {regime}")
        axis.set_xlabel("latency / ampopt's latency: right of 1 is slower than ampopt")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
