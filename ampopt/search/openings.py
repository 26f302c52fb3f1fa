"""Openings: what has won most often on a kind of device, which is tried first, and what seldom wins.

The lists are of the race's winners on an H200 (`benchmarks/results/h200/peers.json`: 29 networks, both lanes)
and of CPUs (`benchmarks/results/cpu-*/p*.json`: six networks). A test compares those of the H200 with that
file. On a CPU both lanes have an engine in their openings, or they could not be compared after them; beside
one inductor, which takes two cores 17 s and more, has won in none of those networks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import fx

from ampopt.engines.rounds import is_unrolled
from ampopt.ir.casting import is_product, stays_in_fp32
from ampopt.ir.graph import arguments, aten, calls, constant
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass
from ampopt.kernels.fused_conv import is_available

UNLIKELY = "it seldom gains, and the time for that was over: a larger time budget tries it"
"""The reason of what was not tried after the time for unlikely trials."""

EXACT = ("remove-inference-noops", "fold-constants", "fold-conv-bn", "merge-linear-chain")
"""Algebra that removes work; it takes no time to try, and does nothing where there is nothing to remove."""


@dataclasses.dataclass(frozen=True)
class Opening:
    """The names of the passes that are tried first.

    `rewrites` are applied together and judged as a whole; `engine` runs the result. `late` are passes and
    engines that win seldom, or gain little for the seconds that they take: they are tried last. So are those
    that are `outdone`, where the opening's engine could be tried. `helpers` join the rewrites, one at a time,
    where those are exact enough and lose: without its search, cuDNN may choose slow algorithms for what the
    rewrites made; to convert a large image may take longer than the lower precision spares, and cuDNN's
    kernels for three channels lose infinities.
    `inseparable` are a layout and the kernels that are measured in it, which gain together or not at all.
    """

    rewrites: tuple[str, ...]
    engine: str | None = None
    late: tuple[str, ...] = ()
    outdone: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()
    inseparable: tuple[str, ...] = ()


_LATE = ("degroup", "fuse-linear-act", "script", "parallel-branches")
_LATE_IN_AMP = ("search-conv-algorithms", *_LATE)

_PACKED = ("channels-last", "fuse-conv-triton")

_ON_CPU = ("channels-last", "fuse-conv-onednn")
_OUTDONE = ("compile",)

OPENINGS = {
    ("cuda", False): Opening((*EXACT, "search-conv-algorithms", "fuse-conv-act"), None, _LATE),
    ("cuda", True): Opening(
        (*EXACT, "bake-autocast", "channels-last", "fuse-conv-act"),
        None,
        _LATE_IN_AMP,
        helpers=("search-conv-algorithms", "fuse-image-conv"),
    ),
    ("cpu", False): Opening((*EXACT, *_ON_CPU), "onnx-runtime", _LATE, _OUTDONE),
    ("cpu", True): Opening((*EXACT, "bake-autocast", *_ON_CPU), "openvino", _LATE, _OUTDONE),
}
"""By type of device, and whether the lane computes in lower precision."""

COMPILED_ON_CPU = {
    is_mixed: dataclasses.replace(OPENINGS["cpu", is_mixed], engine="compile", outdone=())
    for is_mixed in (False, True)
}
"""Those of graphs without a product on a CPU, such as code between submodules, and of unrolled loops.

A call of a graph without a product may take 20 µs and come a thousand times: in another runtime it is no
faster for what entering that takes, and inductor makes one loop of it. Of an unrolled loop inductor compiles
the rounds once (`ampopt.engines.rounds`); another runtime takes each of RAFT's 1,286 calls for itself, which
took ONNX Runtime 60 s on two cores, for 2.2 times the graph's time.
"""


DEPTHWISE_IN_AMP = dataclasses.replace(
    OPENINGS["cuda", True],
    rewrites=(*EXACT, "bake-autocast", *_PACKED, "fuse-conv-act"),
    inseparable=_PACKED,
)
"""That of networks with depthwise convolutions in lower precision on a GPU.

cuDNN compiles a kernel for each of them, for up to 0.9 s, and for each layout again; our own kernels for the
channel innermost are compiled in other processes by then.
"""


def opening_of(program: Program, passes: Iterable[Pass]) -> Opening:
    """The opening of a lane's first program with these passes; an empty one for devices without results."""
    kind = program.device.type, program.lane.is_mixed
    if kind == ("cuda", True) and is_available() and {step.name for step in passes} >= {*_PACKED}:
        return DEPTHWISE_IN_AMP if _has_depthwise(program.graph) else OPENINGS[kind]
    if kind[0] == "cpu" and (_is_pointwise(program.graph) or is_unrolled(program.graph)):
        return COMPILED_ON_CPU[kind[1]]
    return OPENINGS.get(kind, Opening(()))


def _is_pointwise(module: fx.GraphModule) -> bool:
    return not any(is_product(node) or stays_in_fp32(node) for node in calls(module))


def _has_depthwise(module: fx.GraphModule) -> bool:
    convs = (arguments(node) for node in calls(module, [aten.conv2d.default]))
    weights = ((constant(module, own["weight"]), own["groups"]) for own in convs if own["groups"] > 1)
    return any(weight is not None and weight.shape[:2] == (groups, 1) for weight, groups in weights)
