"""Where benchmark results are kept: rows labelled with machine and commit, and tables made from them."""

from __future__ import annotations

import json
import math
import operator
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ampopt.system.environment import device_name
from benchmarks import cold_lines
from benchmarks.models import WORKLOADS

Row = dict[str, Any]

HAND = "fp16 + channels_last + fold + graph by hand"


def commit() -> str:
    """The commit that the code is at, with `+changes` where the working tree differs from it.

    A copy without the repository is told by the environment variable AMPOPT_COMMIT.
    """
    if told := os.environ.get("AMPOPT_COMMIT"):
        return told
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty=+changes",
        "--abbrev=10",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def results_folder(root: Path, device: torch.device) -> Path:
    """`root`/h200, `root`/cpu-amd-epyc-avx2, …, made where it is not there yet."""
    name = device_name(device).lower().replace("nvidia", "").partition("(")[0]
    if device.type == "cpu":  # what a processor can do shows in its instructions, not in its name
        name = f"cpu {name} {torch.backends.cpu.get_cpu_capability().lower()}"
    folder = root / "-".join("".join(c if c.isalnum() else " " for c in name).split())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_FOLDERS = re.compile(r"(?:/[\w.+-]+)+/(?=[\w.+-]+)")


def told(failure: Exception) -> str:
    """A failure for a row: its kind and its text in short, with the names of files but not their folders."""
    return f"{type(failure).__name__}: {_FOLDERS.sub('', str(failure))}"[:300]


def update(
    file: Path, new: Sequence[Row], key: Callable[[Row], object], order: Iterable[object]
) -> list[Row]:
    """Add rows to a JSON file in place of those with the same key; all rows, in the order of their keys."""
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    kept = {key(row): row for row in (*rows, *new)}
    ordered = [kept[each] for each in order if each in kept]
    file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return ordered


def write_table(
    folder: Path,
    name: str,
    new: Sequence[Row],
    key: Callable[[Row], object],
    order: Iterable[object],
    to_table: Callable[[list[Row]], str],
) -> list[Row]:
    """Add rows to `name`.json, see `update`, and make `name`.md anew, the table of all rows; all rows."""
    rows = update(folder / f"{name}.json", new, key, order)
    (folder / f"{name}.md").write_text(to_table(rows), encoding="utf-8")
    return rows


def heading(title: str, rows: Sequence[Row]) -> list[str]:
    """The lines that say where, with what and at which commits rows were measured; the last goes on."""
    facts: dict[str, str] = next((row["environment"] for row in rows if "environment" in row), {})
    commits = ", ".join(sorted({each for row in rows for each in row.get("commit", "?").split(", ")}))
    return [
        f"# {title} on {facts.get('device', '?')}",
        "",
        ", ".join(f"{key} {value}" for key, value in facts.items() if key != "device"),
        f"; commit {commits}.",
    ]


def write_results(folder: Path, row: dict[str, Any]) -> None:
    """Add or replace one workload's row in passes.json and make the table anew."""
    write_table(folder, "passes", [row], operator.itemgetter("workload"), WORKLOADS, to_markdown)


LARGEST_ERROR, TIMES_EAGERS = 1e-2, 2.0
"""A peer counts up to this error, or up to so many times that of eager in the same lane if it is larger."""


def exact_enough(error: float | None, eagers: float | None) -> bool:
    """Whether a peer's answer is one: None, for NaN and infinities, is not."""
    return error is not None and error <= max(LARGEST_ERROR, TIMES_EAGERS * (eagers or 0.0))


def geometric_mean(values: list[float]) -> float:
    """exp(mean(log(values)))."""
    return math.exp(sum(map(math.log, values)) / len(values))


def latency_table(rows: list[dict[str, Any]]) -> list[str]:
    """Median latencies of all contestants, a row for each workload, geometric means of ratios last."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("contestants", {})))
    lines = ["| workload | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [_cell(row.get("contestants", {}).get(name)) for name in names]
        lines.append(f"| {row['workload']} | " + " | ".join(cells) + " |")
    lines.append("")
    for ours, peer in (
        ("ampopt amp", HAND),
        ("ampopt amp", "eager fp32"),
        ("ampopt fp32", "eager fp32"),
        ("ampopt fp32", "fp32 + graph by hand"),
    ):
        ratios = [r for row in rows if (r := ratio(row, ours, peer)) is not None]
        if ratios:
            lines.append(
                f"- {ours} / {peer}: geometric mean {geometric_mean(ratios):.3f}, "
                f"worst {max(ratios):.3f}, over {len(ratios)} workloads"
            )
    best = [r for row in rows if (r := best_ratio(row)) is not None]
    if best:
        lines.append(
            f"- best lane / eager fp32: geometric mean {geometric_mean(best):.3f}, worst {max(best):.3f}"
        )
    beyond = [us for row in rows for us in row.get("beyond_replay_us", {}).values() if us is not None]
    if beyond:
        lines.append(beyond_replays(beyond))
    return lines


def beyond_replays(beyond: Sequence[float]) -> str:
    """What calls cost beyond the replays of their CUDA graphs, in µs, as one line of a list."""
    return (
        f"- a call beyond the bare replay of its CUDA graph: median {statistics.median(beyond):.1f} µs, "
        f"least {min(beyond):.1f} µs, most {max(beyond):.1f} µs, over {len(beyond)}"
    )


def median(row: dict[str, Any], name: str) -> float | None:
    """A contestant's median latency in ms; None where it did not run."""
    value = row.get("contestants", {}).get(name, {}).get("p50_ms")
    return None if value is None else float(value)


def ratio(row: dict[str, Any], ours: str, peer: str) -> float | None:
    """Our median latency over a peer's."""
    a, b = median(row, ours), median(row, peer)
    return None if a is None or b is None else a / b


def best_ratio(row: dict[str, Any]) -> float | None:
    """The faster lane's median latency over eager FP32's."""
    found = [r for lane in ("fp32", "amp") if (r := ratio(row, f"ampopt {lane}", "eager fp32")) is not None]
    return min(found) if found else None


def _cell(value: dict[str, Any] | None) -> str:
    if value is None:
        return "–"
    if "error" in value:
        return "failed: " + str(value["error"])[:60].replace("|", "/").replace("\n", " ")
    return f"{value['p50_ms']:.3f}"


def pass_table(rows: list[dict[str, Any]]) -> list[str]:
    """What every pass did: a line for each workload, lane and pass that changed something."""
    lines = ["| workload | lane | pass | verdict | latency ms | device ms | gain | error |", "|---" * 8 + "|"]
    for row in rows:
        for lane in ("fp32", "amp"):
            for entry in row.get(lane, {}).get("passes", []):
                if entry["verdict"] in ("declined",):
                    continue
                gain = "–" if entry["gain"] is None else f"{entry['gain']['ratio']:.3f}"
                error = "–" if entry["error"] is None else f"{entry['error']:.1e}"
                clocks = [_arrow(entry, clock) for clock in ("latency", "device")]
                cells = [row["workload"], lane, entry["pass"], entry["verdict"], *clocks, gain, error]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def _arrow(entry: dict[str, Any], clock: str) -> str:
    sides = [(entry[side] or {}).get(clock) for side in ("before", "after")]
    known = [f"{side['p50_ms']:.3f}" for side in sides if side is not None]
    return " → ".join(known) if len(known) == 2 else "–"


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """Both tables under a heading that says where and with what they were measured."""
    header = [
        *heading("Per-pass effects", rows),
        "Median latency in ms of one synchronised call, contestants sampled in turn.",
        "",
    ]
    parts = [
        *header,
        *latency_table(rows),
        *cold_lines.lines(rows),
        "",
        "## Every pass",
        "",
        *pass_table(rows),
    ]
    return "\n".join(parts) + "\n"
