"""Convolutions for which PyTorch reads uninitialized memory, on a CPU and below FP32.

Found with torch 2.11 and 2.14 on processors with AMX, by filling free memory with NaN before each of 50,000
random convolutions: if the output is one element wide while the kernel is wider and its stride is more than
one (the last stage of a ResNet on 32x32 images), a part of the output is NaN. Without the filling it is the
memory's former content, so a comparison may not detect it. If an output element lies in the padding alone,
PyTorch has crashed.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from ampopt.ir.emulated_half import EmulatedHalf
from ampopt.ir.graph import CONVOLUTIONS, arguments, calls, cast_for_readers, dtype_of, shape_of, where
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes


def keep_narrow_convs_in_fp32(program: Program, module: fx.GraphModule) -> None:
    """Mark these convolutions of `module`, a copy of the CPU program's graph, so that no policy lowers them.

    Their results are cast, so that all readers get the dtype that autocast would give.
    """
    if program.device.type != "cpu" or EmulatedHalf.is_active() or not any(calls(module, CONVOLUTIONS)):
        return
    known = {node.name: node for node in record_shapes(program).graph.nodes}
    for node in list(calls(module, CONVOLUTIONS)):
        own = known[node.name]
        if _is_unsafe(own) and dtype_of(arguments(own)["weight"]) is torch.float32:
            node.meta[FULL_PRECISION] = True
            cast_for_readers(module, node, dtype_of(own))


def why_it_may_crash(program: Program) -> str | None:
    """Why PyTorch may crash in this program's convolutions below FP32 on a CPU; None if it does not."""
    if program.device.type == "cpu" and any(calls(program.graph, CONVOLUTIONS)):
        for node in calls(record_shapes(program), CONVOLUTIONS):
            if _reads_padding_alone(node):
                return f"{where(node)} has outputs that lie in its padding alone, where PyTorch has crashed"
    return None


def narrow_convs(program: Program) -> frozenset[str]:
    """The convolutions that have to stay in FP32 at the sizes of a program's examples, by their names."""
    if program.device.type != "cpu" or not any(calls(program.graph, CONVOLUTIONS)):
        return frozenset()
    return frozenset(node.name for node in calls(record_shapes(program), CONVOLUTIONS) if _is_unsafe(node))


@dataclasses.dataclass(frozen=True)
class _Axis:
    """One spatial dimension of a convolution."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    out: int

    def reads_padding_alone(self) -> bool:
        firsts = (place * self.stride - self.padding for place in range(self.out))
        reads = ([first + tap * self.dilation for tap in range(self.kernel)] for first in firsts)
        return any(not any(0 <= place < self.size for place in places) for places in reads)


def _axes(conv: fx.Node) -> list[_Axis]:
    own = arguments(conv)
    kernel = shape_of(own["weight"])[2:]
    rank = len(kernel)
    sizes, out = shape_of(own["input"])[-rank:], shape_of(conv)[-rank:]
    stride, padding, dilation = (
        [*own[name]] * (rank // len(own[name])) for name in ("stride", "padding", "dilation")
    )
    return list(map(_Axis, sizes, kernel, stride, padding, dilation, out))


def _is_unsafe(conv: fx.Node) -> bool:
    last = _axes(conv)[-1]
    return (last.out == 1 and last.kernel > 1 and last.stride > 1) or _reads_padding_alone(conv)


def _reads_padding_alone(conv: fx.Node) -> bool:
    return any(axis.reads_padding_alone() for axis in _axes(conv))
