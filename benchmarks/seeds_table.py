"""The table of the five questions: today's figures beside those that were reported."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import cold_lines
from benchmarks.results_files import Row, heading
from benchmarks.seeds_workloads import SEEDS, Reported

METHOD = """
Training: one step on one batch, synchronised and warmed up, all ways sampled in turn: `zero_grad`, forward
and loss, backward, SGD; mixed precision with `GradScaler` on a GPU, in bfloat16 on a CPU. O2 is apex's:
16-bit weights, FP32 batch normalization, FP32 copies of the weights. Peak memory is what a way adds on the
GPU. Inference: calls in evaluation mode without gradients; O1 and O2 are ampopt's policies with nothing else.
"Reported" are the figures of the question, on the device that it names. TF32 is off.
""".strip()


def to_markdown(rows: Sequence[Row]) -> str:
    """A section for each question."""
    lines = [*heading("The five questions", rows), METHOD]
    for question in dict.fromkeys(row["question"] for row in rows):
        for row in (each for each in rows if each["question"] == question):
            lines += ["", f"## {question}: {row['workload']}", "", *_section(row)]
    lines += cold_lines.lines(rows)
    return "\n".join(lines) + "\n"


def _section(row: Row) -> list[str]:
    if "skipped" in row:
        return [f"Not run: {row['skipped']}."]
    reported = SEEDS[row["workload"]].reported
    devices = list(dict.fromkeys(each.device for each in reported if each.part == "step"))
    lines = [
        "| training step | ms | FP32 / it | peak MiB | "
        + " | ".join(f"reported, {d}" for d in devices)
        + " |"
    ]
    if not devices:
        lines = ["| training step | ms | FP32 / it | peak MiB |"]
    lines.append("|---" * (4 + len(devices)) + "|")
    for way, found in row["training"].items():
        cells = [way, *_times(found, row["training"]["fp32"]), _memory(found)]
        cells += [_reported(reported, device, way) for device in devices]
        lines.append("| " + " | ".join(cells) + " |")
    told = {each.part: each for each in reported if each.part != "step"}
    parts = ", ".join(
        f"{name} {ms:.3f} ms" + (f" (reported {told[name].ms:.3f})" if name in told else "")
        for name, ms in row["parts"].items()
    )
    lines += ["", f"The parts in FP32: {parts}.", "", "| inference | ms | FP32 / it |", "|---|---|---|"]
    for way, found in row["inference"].items():
        lines.append("| " + " | ".join([way, *_times(found, row["inference"]["fp32"])]) + " |")
    return lines


def _times(found: Row, base: Row) -> list[str]:
    if "p50_ms" not in found:
        return [f"failed: {found['error']}"[:80].replace("|", "/").replace("\n", " "), "–"]
    return [f"{found['p50_ms']:.3f}", f"{base['p50_ms'] / found['p50_ms']:.2f}" if "p50_ms" in base else "–"]


def _memory(found: Row) -> str:
    peak = found.get("peak_mib")
    return "–" if not peak else f"{peak:.0f}"  # 0: what was given back meanwhile hid it


def _reported(reported: Sequence[Reported], device: str, way: str) -> str:
    for each in reported:
        if (each.device, each.way, each.part) == (device, way, "step"):
            return f"{each.ms:.2f} ms" + ("" if each.mb is None else f", {each.mb:.0f} MB")
    return "–"
