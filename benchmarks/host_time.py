"""What a call costs beyond the kernels that it replays, on every network of the race.

    python -m benchmarks.host_time [--models NAME ...] [--out DIR]

Latencies say what a robot waits for; host times, until a call returns while the GPU works, say what its
processor is busy with. The programs are made by a few quick passes. Writes
DIR/<device>/host_time.json and the Markdown table that is made from it; networks that were not run this time
keep the rows that are there. Needs a CUDA device.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampopt import OptimizedModule
from ampopt.engines.cuda_graphs import CapturedGraph
from ampopt.ir.capture import Captured
from ampopt.ir.lanes import Lane
from ampopt.ir.signature import flatten_outputs
from ampopt.ir.transform import Recipe, replay
from ampopt.measure.clocks import latency, synchronize
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.ledger import Ledger
from ampopt.measure.sampling import Measurement, Sampler, interleave
from ampopt.passes import BakeAutocast, ChannelsLast, CudaGraph, FoldConvBn
from benchmarks import cold_lines
from benchmarks.on_cuda import row_of, run
from benchmarks.race_networks import RACE
from benchmarks.results_files import Row, beyond_replays, heading, write_table

PASSES = (BakeAutocast(), FoldConvBn(), ChannelsLast(), CudaGraph())


def beside_replay(
    fast: OptimizedModule, inputs: tuple[Tensor, ...], device: torch.device
) -> dict[str, Measurement] | None:
    """Latencies of a `call` and of the bare `replay` of its kernels in a CUDA graph; host times of both.

    None where no CUDA graph answers. The replay is the launch of the same instance of the same graph on the
    same input: another one takes up to 4 % more or less.
    """
    if not fast.program.cuda_graph or fast.report.chosen == ORIGINAL:
        return None
    captured = fast._calls.answers[-1].run
    assert isinstance(captured, CapturedGraph)
    calls: dict[str, Callable[[], object]] = {
        "call": functools.partial(fast, *inputs),
        "replay": captured.bare_launch(*inputs),
    }
    samplers = {name: latency(call, device) for name, call in calls.items()}
    on_host = {f"host {name}": _host_time(call, device) for name, call in calls.items()}
    return interleave(samplers, seconds=1.0) | interleave(on_host, seconds=0.25)


def _host_time(call: Callable[[], object], device: torch.device) -> Sampler:
    """Samples the time until a call returns, made while the GPU has nothing else to do."""

    def sample() -> float:
        call()
        synchronize(device)
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        synchronize(device)
        return took

    return sample


def beyond_replay(fast: OptimizedModule, inputs: tuple[Tensor, ...], device: torch.device) -> float | None:
    """Microseconds of a call beyond the bare replay, a difference of two medians; see `beside_replay`."""
    timed = beside_replay(fast, inputs, device)
    return None if timed is None else _beyond_us(timed)


def _beyond_us(timed: dict[str, Measurement], clock: str = "") -> float:
    return round(1e6 * (timed[f"{clock}call"].median - timed[f"{clock}replay"].median), 2)


def measure_network(name: str, device: torch.device) -> Row:
    """One network in both lanes."""
    return row_of(name, device, _measure_lane)


def _measure_lane(original: nn.Module, captured: Captured, lane: Lane) -> dict[str, Any]:
    fast, tensors = _quickly(original, captured, lane), captured.program.examples
    timed = beside_replay(fast, tensors, captured.program.device)
    assert timed is not None
    return {
        **{key: each.to_dict() for key, each in timed.items()},
        "beyond_replay_us": _beyond_us(timed),
        "host_beyond_us": _beyond_us(timed, "host "),
        "results": len(flatten_outputs(fast(*tensors))[0]),
    }


def _quickly(original: nn.Module, captured: Captured, lane: Lane) -> OptimizedModule:
    """A captured network after a few passes, in a CUDA graph; nothing is timed."""
    program = replay(PASSES, lane.start(captured.program))
    recipe = Recipe(lane, program.recipe)
    return OptimizedModule(original, captured, program, recipe, Ledger("network", {}, ()))


def to_markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    head = (
        *("network", "lane", "tensors in the result", "call us", "replay us"),
        *("beyond us", "host beyond us", "commit"),
    )
    lines = [*heading("Calls beside the replays of their CUDA graphs", rows), ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    beyond: list[float] = []
    for row in rows:
        for lane, found in row["lanes"].items():
            if "error" in found:
                lines.append(
                    f"| {row['network']} | {lane} | – | {found['error']} | – | – | – | {row['commit']} |"
                )
                continue
            times = [f"{1e3 * found[key]['p50_ms']:.1f}" for key in ("call", "replay")]
            beside = [f"{found[key]:.1f}" for key in ("beyond_replay_us", "host_beyond_us")]
            cells = [row["network"], lane, str(found["results"]), *times, *beside, row["commit"]]
            lines.append("| " + " | ".join(cells) + " |")
            beyond.append(found["beyond_replay_us"])
    told = [*lines, "", *([beyond_replays(beyond)] if beyond else []), *cold_lines.lines(rows)]
    return "\n".join(told) + "\n"


def write_row(folder: Path, row: Row) -> None:
    """Add or replace a network's row in host_time.json and make the table anew."""
    write_table(folder, "host_time", [row], operator.itemgetter("network"), RACE, to_markdown)


def main() -> None:
    """Measure every network asked for and write the results."""
    run(__doc__, measure_network, write_row)


if __name__ == "__main__":
    main()
