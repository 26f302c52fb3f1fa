"""Depthwise convolutions with the channel innermost: our Triton kernels beside cuDNN's.

    python -m benchmarks.depthwise [--models NAME ...] [--out DIR]

`fuse-conv-triton` does not time cuDNN for them, because that compiles a kernel for each in its first call.
Here both are timed at every such place of a network, with what is fused into it: the fastest tile, PyTorch's
operators one after another with cuDNN's search on, and the first call of those. Times are of kernels in CUDA
graphs. Writes DIR/<device>/depthwise.json and the Markdown table that is made from it. Needs a CUDA device.
"""

from __future__ import annotations

import functools
import operator
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ampopt.ir.program import Program
from ampopt.ir.settings import Settings
from ampopt.ir.shapes import expected_shapes
from ampopt.ir.transform import replay
from ampopt.kernels.conv_chains import find_chains
from ampopt.kernels.conv_tiles import Site
from ampopt.kernels.conv_timing import compile_all, fastest
from ampopt.kernels.fused_conv import reference
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn
from benchmarks import cold_lines
from benchmarks.cold_networks import COLD, all_names
from benchmarks.left_out import seconds
from benchmarks.on_cuda import row_of, run
from benchmarks.results_files import Row, heading, write_table

PASSES = (BakeAutocast(), FoldConvBn(), ChannelsLast())

COMPILING_S = 120.0


def measure_site(site: Site, device: torch.device) -> dict[str, Any]:
    """Microseconds of the fastest tile and of PyTorch's operators; seconds of the first call of those."""
    x, w, b, z, s = site.random_operands(device)
    plain = functools.partial(reference, x, w, b, z, s, site.geometry, site.groups, site.act1, site.act2)
    with Settings().scope(device):
        began = time.perf_counter()
        plain()
        torch.cuda.synchronize(device)
        first_s = time.perf_counter() - began
    ours = fastest(site, site.tiles(), device, Settings())
    return {
        "input and weight": [list(site.input_shape), list(site.weight_shape)],
        "geometry": list(site.geometry),
        "first_s": first_s,
        "cudnn_us": 1e6 * seconds({"plain": plain}, device)["plain"],
        "triton_us": 1e6 * min(ours.seconds.values()),
    }


def measure_lane(program: Program, device: torch.device) -> dict[str, Any]:
    """Every different depthwise place of one network in one lane."""
    chains, _ = find_chains(expected_shapes(program), program.settings.tf32)
    sites = [site for site in dict.fromkeys(chain.site for chain in chains) if site.is_depthwise]
    compile_all(sites, device, COMPILING_S)
    return {"sites": [measure_site(site, device) for site in sites]}


def measure_network(name: str, device: torch.device) -> Row:
    """One network in both lanes."""
    return row_of(
        name,
        device,
        lambda _original, captured, lane: measure_lane(replay(PASSES, lane.start(captured.program)), device),
    )


def to_markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    head = ("network", "lane", "places", "cuDNN / ours: least", "median", "most", "first calls, s", "commit")
    lines = [*heading("Depthwise convolutions with the channel innermost", rows), ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        for lane, found in row["lanes"].items():
            cells = [row["network"], lane, *_cells(found), row["commit"]]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *cold_lines.lines(rows)]) + "\n"


def _cells(found: dict[str, Any]) -> list[str]:
    if not found.get("sites"):
        return [found.get("error", "0"), *["–"] * 4]
    ratios = [site["cudnn_us"] / site["triton_us"] for site in found["sites"]]
    first_s = sum(site["first_s"] for site in found["sites"])
    figures = (min(ratios), statistics.median(ratios), max(ratios))
    return [str(len(ratios)), *(f"{figure:.2f}" for figure in figures), f"{first_s:.1f}"]


def write_row(folder: Path, row: Row) -> None:
    """Add or replace a network's row in depthwise.json and make the table anew."""
    write_table(folder, "depthwise", [row], operator.itemgetter("network"), all_names(), to_markdown)


def main() -> None:
    """Measure every network asked for and write the results after each."""
    run(__doc__, measure_network, write_row, networks=all_names(), default=COLD)


if __name__ == "__main__":
    main()
