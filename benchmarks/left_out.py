"""What two transforms that ampopt has not got could gain at most, on every network of the race.

    python -m benchmarks.left_out [--models NAME ...] [--out DIR]

*Padding* channels to multiples of 8, so that Tensor Cores can read them: every convolution with other
numbers of channels is timed as it is and with zeros added to its input, its result or both. What it gains
there counts in full, as if the zeros had been there already and nobody had to cut them off; where that would
be a gain, it is timed with the copy that adds the zeros, too. *Concatenation* without copies: every
`cat` is timed, and counts in full, as if whatever computes its parts could write into the result for
nothing. Times are of kernels in CUDA graphs, beside that of the whole network after quick passes. Writes
DIR/<device>/left_out.json and the Markdown table that is made from it. Needs a CUDA device.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.engines.graph_capture import ReplayedProgram, capture_calls
from ampopt.ir.graph import arguments, aten, calls, tensor_meta
from ampopt.ir.program import Program
from ampopt.ir.settings import Settings
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import replay
from ampopt.measure.clocks import device_time
from ampopt.measure.sampling import interleave
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn
from benchmarks import cold_lines
from benchmarks.on_cuda import row_of, run
from benchmarks.race_networks import RACE
from benchmarks.results_files import Row, heading, write_table

MULTIPLE = 8
"""Channels that Tensor Cores want to be divisible by, for two bytes a number."""

AT_ONCE = 10
"""Calls in one captured graph, so that the graph's own start weighs little."""

PASSES = (BakeAutocast(), FoldConvBn(), ChannelsLast())

SEARCHED = Settings(search_algorithms=True)
"""cuDNN times its algorithms for the padded convolutions as for the others."""


def seconds(ways: Mapping[str, Callable[[], Tensor]], device: torch.device) -> dict[str, float]:
    """Device seconds of one call of each, sampled in turn."""
    graphs, samplers = [], {}
    with SEARCHED.scope(device):
        for name, call in ways.items():
            graph = capture_calls(functools.partial(_repeated, call))[0]
            graphs.append(graph)
            samplers[name] = device_time(graph.replay, device, sample_s=5e-4)
        timed = interleave(samplers, seconds=0.02, least=5)
    return {name: found.median / AT_ONCE for name, found in timed.items()}


def _repeated(call: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    return (*(call() for _ in range(AT_ONCE)),)[-1:]


def _random(node: fx.Node, device: torch.device) -> Tensor:
    meta = tensor_meta(node)
    last = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=True))
    memory = torch.randn(last + 1, dtype=meta.dtype, device=device)  # an expanded tensor's places are shared
    return memory.as_strided(meta.shape, meta.stride)


def _missing(count: int) -> int:
    return -count % MULTIPLE


def padded_convolution(conv: fx.Node, device: torch.device) -> dict[str, float] | None:
    """Seconds of a convolution as it is and padded; None where its channels are multiples already."""
    own = arguments(conv)
    x, weight = (_random(own[name], device) for name in ("input", "weight"))
    fewer = _missing(weight.shape[1]), _missing(weight.shape[0])
    if own["groups"] != 1 or fewer == (0, 0) or not x.is_floating_point():
        return None
    rest = own["stride"], own["padding"], own["dilation"]

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x, weight, None, *rest)

    ways = {"as it is": functools.partial(convolve, x, weight)}
    for into, out in {(fewer[0], 0), (0, fewer[1]), fewer} - {(0, 0)}:
        wide = _like(torch.nn.functional.pad(weight, (0, 0, 0, 0, 0, into, 0, out)), weight)
        ways[f"+{into} +{out}"] = functools.partial(convolve, _widened(x, into), wide)
        if into:
            ways[f"+{into} +{out}, copied"] = functools.partial(
                lambda wide, into: convolve(_widened(x, into), wide), wide, into
            )
    return seconds(ways, device)


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    last = other.is_contiguous(memory_format=torch.channels_last)
    return tensor.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _widened(x: Tensor, more: int) -> Tensor:
    return _like(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, more)), x) if more else x


def concatenation(cat: fx.Node, device: torch.device) -> float:
    """Seconds of a `cat`."""
    own = arguments(cat)
    parts = [_random(part, device) for part in own["tensors"]]
    return seconds({"cat": functools.partial(torch.cat, parts, own["dim"])}, device)["cat"]


def _alike(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, int]]:
    """One node of each kind, by operands and arguments, and how often it is there."""
    kinds: dict[str, fx.Node] = {}
    counts = Counter[str]()
    for node in nodes:
        key = str(fx.map_arg((node.args, node.kwargs), lambda source: str(tensor_meta(source))))
        kinds.setdefault(key, node)
        counts[key] += 1
    return [(node, counts[key]) for key, node in kinds.items()]


def measure_lane(program: Program) -> dict[str, Any]:
    """One network in one lane: milliseconds of the whole, of what padding gains, and of concatenations."""
    device, module = program.device, record_shapes(program)
    whole = device_time(ReplayedProgram(program).replay, device)
    padded: list[dict[str, Any]] = []
    for conv, count in _alike(list(calls(module, [aten.conv2d.default]))):
        if (found := padded_convolution(conv, device)) is not None:
            shapes = [list(tensor_meta(each).shape) for each in conv.all_input_nodes[:2]]
            times = {way: 1e3 * value for way, value in found.items()}
            padded.append({"input and weight": shapes, "count": count, "ms": times})
    cats = _alike(list(calls(module, [aten.cat.default])))
    cats_s = [concatenation(cat, device) * count for cat, count in cats]
    return {
        "ms": 1e3 * interleave({"whole": whole}, seconds=0.2, least=10)["whole"].median,
        "padded": padded,
        "padding_ms": sum(each["count"] * _gain(each["ms"], copied=False) for each in padded),
        "padding_copied_ms": sum(each["count"] * _gain(each["ms"], copied=True) for each in padded),
        "concatenations": sum(count for _, count in cats),
        "concatenation_ms": 1e3 * sum(cats_s),
    }


def _gain(times: dict[str, float], *, copied: bool) -> float:
    """What the best padded form takes less; `copied`: of those that pay for what they need."""
    counted = [
        value for way, value in times.items() if not copied or way.startswith("+0") or way.endswith("copied")
    ]
    return max(0.0, times["as it is"] - min([*counted, times["as it is"]]))


def measure_network(name: str, device: torch.device) -> Row:
    """One network in both lanes."""
    return row_of(
        name,
        device,
        lambda _original, captured, lane: measure_lane(replay(PASSES, lane.start(captured.program))),
    )


def to_markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    head = ("network", "lane", "kernels ms", "padding, at most", "with its copies", "`cat`s", "their time")
    lines = [*heading("What transforms that are left out could gain", rows), ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        for lane, found in row["lanes"].items():
            if "error" in found:
                cells = [found["error"], *["–"] * 4]
            else:
                keys = ("padding_ms", "padding_copied_ms", "concatenation_ms")
                shares = [f"{found[key] / found['ms']:.1%}" for key in keys]
                cells = [f"{found['ms']:.3f}", *shares[:2], str(found["concatenations"]), shares[2]]
            lines.append("| " + " | ".join([row["network"], lane, *cells]) + " |")
    return "\n".join([*lines, *cold_lines.lines(rows)]) + "\n"


def write_row(folder: Path, row: Row) -> None:
    """Add or replace a network's row in left_out.json and make the table anew."""
    write_table(folder, "left_out", [row], operator.itemgetter("network"), RACE, to_markdown)


def main() -> None:
    """Measure every network asked for and write the results after each."""
    run(__doc__, measure_network, write_row)


if __name__ == "__main__":
    main()
