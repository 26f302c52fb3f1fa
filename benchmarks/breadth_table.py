"""The table and the histogram of the breadth: how a default call stands on every network, peer by peer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cold_lines import AUTOTUNED, BY_HAND, COMPILED, EAGER, EAGER_AMP, OURS, p50
from benchmarks.cold_table import seconds_to
from benchmarks.regimes import REGIMES
from benchmarks.results_files import LARGEST_ERROR, Row, exact_enough, geometric_mean, heading

PEERS = (EAGER, COMPILED, BY_HAND)
"""Whom a default call is measured against: eager FP32, `torch.compile`, and the recipe by hand."""

SLOWER = 0.97
"""Below this ratio a network is named: less is within what two runs of the same program differ."""

METHOD = """
Each row is `ampopt.optimize(model, x)` with nothing else in a process of its own whose caches are all empty.
Then all are timed in turn in that process, back to back and at 30 Hz with idle gaps: medians of synchronised
calls; each takes float32 and gives float32 that stays the caller's. `torch.compile`: reduce-overhead under
FP16 autocast on a GPU, or its defaults where that fails (below); freezing in FP32 on a CPU; where a row has
max-autotune with coordinate descent, too (named below), the faster of the two. By hand: on a GPU
FP16, channels_last, folded, in a plain CUDA graph; on a CPU folded and channels_last. Ratios are a peer's
time over ampopt's in the less favourable regime. Errors are of the outputs and of what a call writes to its
inputs. A peer counts up to an error of 1e-2, or twice eager's with autocast; where eager FP32's own is larger
than 1e-2, or cannot be told, because the outputs jump with roundings, every peer counts. Load: the average
of the machine when the call had ended.
""".strip()

HEAD = (
    *("network", "lane", "error", "eager's", "prepared in s"),
    *(f"{regime}: eager, compile, by hand, **ampopt** ms" for regime in REGIMES),
    *("eager / ampopt", "compile / ampopt", "by hand / ampopt", "best / ampopt"),
    *("peak host MiB", "peak device MiB", "load", "commit"),
)


def to_markdown(rows: Sequence[Row]) -> str:
    """How ampopt stands against each peer; every network; the reports' notes; what did not run, and why."""
    ran = [row for row in rows if "contestants" in row]
    lines = [
        *heading("The breadth", rows),
        METHOD,
        "",
        *standing(rows),
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---" * len(HEAD) + "|",
        *("| " + " | ".join(_cells(row)) + " |" for row in ran),
    ]
    notes = [f"- {row['network']}: {'; '.join(map(_one_line, row['notes']))}" for row in ran if row["notes"]]
    for title, text in (("Notes of the reports", notes), ("Not run", _not_run(rows))):
        lines += ["", f"## {title}", "", *(text or ["- none"])]
    return "\n".join(lines) + "\n"


def standing(rows: Sequence[Row]) -> list[str]:
    """For each peer and the best of them: geometric mean, the share that is faster, and who is behind it."""
    failed = [row for row in rows if "error" in row]
    ran = [row for row in rows if "contestants" in row]
    lines = [f"- {len(ran)} networks ran, {len(failed)} failed, {len(rows) - len(ran) - len(failed)} skipped"]
    for title, name in (*((name, name) for name in PEERS), ("the best of the three", None)):
        found = {row["network"]: each for row in ran if (each := ratio(row, name)) is not None}
        if not found:
            continue
        faster = sum(each > 1 for each in found.values()) / len(found)
        behind = ", ".join(f"{network} {each:.2f}" for network, each in found.items() if each < SLOWER)
        lines.append(
            f"- {title} / ampopt: geometric mean {geometric_mean(list(found.values())):.2f} of {len(found)}; "
            f"ampopt is faster on {faster:.0%}; below {SLOWER}: {behind or 'none'}"
        )
    if tuned := [row["network"] for row in ran if AUTOTUNED in row["contestants"]]:
        fastest = [row["network"] for row in ran if compiled(row) == AUTOTUNED]
        lines.append(
            f"- max-autotune, too, in {len(tuned)}: {', '.join(tuned)}; it is torch.compile's best in "
            f"{len(fastest)}: {', '.join(fastest) or 'none'}"
        )
    lanes = [row["chosen"] for row in ran]
    if soon := [after for row in ran if (after := seconds_to(row)) is not None]:
        end = statistics.median(row["prepare_s"] for row in ran)
        text = f"90 % of the gain after {statistics.median(soon):.1f} s ({len(soon)} networks)"
        lines.append(f"- in the median {text}, the end after {end:.1f} s")
    lines.append("- lanes: " + ", ".join(f"{lane} {lanes.count(lane)}" for lane in dict.fromkeys(lanes)))
    lines += [f"- failed: {row['network']}: {_one_line(row['error'])}" for row in failed]
    return lines


def counts(row: Row, name: str) -> bool:
    """Whether a peer gives an answer that one may compare with, see `METHOD`. Eager does."""
    errors = {each: facts.get("relative_error") for each, facts in row["contestants"].items()}
    own = errors.get(EAGER)
    if name == EAGER or own is None or own > LARGEST_ERROR:
        return True
    return exact_enough(errors.get(name), errors.get(EAGER_AMP))


def ratio(row: Row, name: str | None) -> float | None:
    """A peer's time over ampopt's in the less favourable regime, None if it is no answer or did not run.

    Without a name, the fastest peer's. That of `torch.compile` is its faster mode's.
    """
    if name is None:
        known = [each for peer in PEERS if (each := ratio(row, peer)) is not None]
        return min(known, default=None)
    return _ratio(row, compiled(row) if name == COMPILED else name)


def compiled(row: Row) -> str:
    """The mode of `torch.compile` that is the fastest answer in this row."""
    known = {name: each for name in (COMPILED, AUTOTUNED) if (each := _ratio(row, name)) is not None}
    return min(known, key=known.__getitem__, default=COMPILED)


def _ratio(row: Row, name: str) -> float | None:
    times = [(p50(row, name, regime), p50(row, OURS, regime)) for regime in REGIMES]
    ratios = [theirs / mine for theirs, mine in times if theirs is not None and mine is not None]
    return min(ratios) if ratios and counts(row, name) else None


def _cells(row: Row) -> list[str]:
    own, eager = (row["contestants"].get(name, {}).get("relative_error") for name in (OURS, EAGER))
    shown = (EAGER, compiled(row), BY_HAND, OURS)
    times = (", ".join(_number(p50(row, name, regime), ".3f") for name in shown) for regime in REGIMES)
    return [
        *(
            row["network"],
            row["chosen"],
            _number(own, ".1e"),
            _number(eager, ".1e"),
            f"{row['prepare_s']:.1f}",
        ),
        *times,
        *(_number(ratio(row, name), ".2f") for name in (*PEERS, None)),
        *(_mebibytes(row[f"peak_{where}_bytes"]) for where in ("host", "device")),
        _number(row["load"], ".1f"),
        row["commit"],
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _mebibytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:.0f}"


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())


def _not_run(rows: Sequence[Row]) -> list[str]:
    lines = [f"- {row['network']}: {_one_line(row['skipped'])}" for row in rows if "skipped" in row]
    for row in rows:
        if row.get("no_reference"):
            lines.append(f"- {row['network']}, in float64: {_one_line(row['no_reference'])}")
        for name, each in row.get("contestants", {}).items():
            if "error" in each:
                lines.append(f"- {row['network']}, {name}: {_one_line(each['error'])}")
            told = f"- {row['network']}, {name} in another way: "
            lines += [told + _one_line(reason) for reason in each.get("other_ways", ())]
    return lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """A histogram of the speed-up over the best of the three peers, in the less favourable regime."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [each for row in rows if "contestants" in row and (each := ratio(row, None)) is not None]
    if not found:
        return
    edges = bins(found)
    figure, axis = plt.subplots(figsize=(8, 4))
    axis.hist(found, bins=edges, color="tab:blue", edgecolor="white")
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.axvline(geometric_mean(found), color="tab:red", linewidth=1.2, label="geometric mean")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("the fastest of eager, torch.compile and the recipe by hand / ampopt")
    axis.set_ylabel("networks")
    axis.set_title(f"A default call on {len(found)} networks, the less favourable regime")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bins(ratios: Sequence[float]) -> list[float]:
    """Edges of equal width in octaves, 8 an octave, that hold all ratios; 1 is one of them."""
    edges = [1.0]
    while edges[0] > min(ratios):
        edges.insert(0, edges[0] / 2**0.125)
    while edges[-1] <= max(ratios):
        edges.append(edges[-1] * 2**0.125)
    return edges
