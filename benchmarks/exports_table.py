"""The Markdown table of the ONNX exports: errors, nodes off the GPU, latency beside a plain export."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks import cold_lines
from benchmarks.results_files import geometric_mean, heading

COLUMNS = (
    *("workload", "precision", "error", "eager's error", "limit", "provider", "opset", "nodes"),
    *("nodes off the GPU", "ours ms", "plain ms", "plain / ours"),
)

FP32_LAST = ("fp16", "fp32")


def to_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each network and precision under a heading that says where and with what, means last."""
    lines = [
        *heading("ONNX exports", rows),
        "Relative error against float64, eager's own in the same precision, and the limit that follows",
        "from it, for the output and provider nearest to its limit (torch: the program that the file was",
        "made from, with every float16 rounding). Median latency in ms of one call in ONNX Runtime, from",
        "and to the host's memory: our file with tuned options, and in turn with it a plain FP32",
        "`torch.onnx.export(dynamo=True)` with default options; how many times faster ours is, as the",
        "median of paired ratios with its 95 % interval.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
        *(line(row) for row in rows),
        "",
    ]
    verified = sum("report" in row for row in rows)
    lines.append(f"- {verified} of {len(rows)} exported and verified")
    return "\n".join([*lines, *means(rows), *cold_lines.lines(rows)]) + "\n"


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    report, timing = row.get("report"), row.get("timing", {})
    cells = [row["workload"], row["precision"]]
    if report is None:
        cells += [f"NOT VERIFIED: {_short(row['error'], 160)}", *"–" * 6]
    else:
        worst = max(report["outputs"], key=_excess)
        off = report["nodes_off_gpu"]
        cells += [f"{worst[key]:.1e}" for key in ("error", "eager_error", "limit")]
        cells += [worst["provider"].removesuffix("ExecutionProvider"), str(report["opset"])]
        cells += [str(report["nodes"]), "–" if off is None else str(len(off))]
    if "gains" in timing:
        found = timing["gains"]["plain / ours"]
        cells += [f"{timing[side]['p50_ms']:.3f}" for side in ("ours", "plain")]
        cells.append(f"{found['ratio']:.3f} ({found['low']:.2f} to {found['high']:.2f})")
    else:
        cells += [_short(timing.get("not_timed", "–"), 120), "–", "–"]
    return "| " + " | ".join(cells) + " |"


def means(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The geometric means of the ratios, FP32's last."""
    lines = []
    for precision in FP32_LAST:
        timed = [row["timing"]["gains"] for row in rows if _is_timed(row) and row["precision"] == precision]
        for pair in reversed(list(dict.fromkeys(pair for gains in timed for pair in gains))):
            ratios = [gains[pair]["ratio"] for gains in timed if pair in gains]
            lines.append(
                f"- {precision}, {pair}: geometric mean {geometric_mean(ratios):.3f}, "
                f"least {min(ratios):.3f}, most {max(ratios):.3f}, over {len(ratios)} networks"
            )
    return lines


def _is_timed(row: dict[str, Any]) -> bool:
    return "gains" in row.get("timing", {})


def _excess(output: dict[str, Any]) -> float:
    return float(output["error"] / output["limit"]) if output["limit"] else 0.0


def _short(text: str, width: int) -> str:
    return textwrap.shorten(text.replace("|", "/"), width, placeholder=" …")
