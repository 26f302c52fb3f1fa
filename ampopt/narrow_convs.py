"""Convolutions that PyTorch computes from memory that nobody has written, on a CPU and below FP32.

Seen with torch 2.11 and 2.14 on processors with AMX, by filling free memory with NaN before each of 50,000
random convolutions: wherever the output is one element wide while the kernel is wider and its stride is more
than one (the last stage of a ResNet on 32x32 images), a part of it is NaN. It is the memory's former content
otherwise, so a comparison may find nothing. Where an output element lies in the padding alone, PyTorch has
crashed.
"""

from __future__ import annotations

import torch
from torch import fx

from ampopt.emulated_half import EmulatedHalf
from ampopt.graph import (
    CONVOLUTIONS,
    FULL_PRECISION,
    arguments,
    aten,
    calls,
    dtype_of,
    insert_call,
    record_shapes,
    shape_of,
)
from ampopt.program import Program


def keep_narrow_convs_in_fp32(program: Program, module: fx.GraphModule) -> None:
    """Mark these convolutions of `module`, a copy of the CPU program's graph; no policy lowers them then.

    Their results are cast, so that all that reads them gets the dtype that autocast would give.
    """
    if program.device.type != "cpu" or EmulatedHalf.is_active():
        return
    known = {node.name: node for node in record_shapes(program).graph.nodes}
    for node in list(calls(module, CONVOLUTIONS)):
        own = known[node.name]
        if _is_unsafe(own) and dtype_of(arguments(own)["weight"]) is torch.float32:
            readers, node.meta[FULL_PRECISION] = list(node.users), True
            cast = insert_call(module, node.next, aten._to_copy.default, node, dtype=dtype_of(own))
            for reader in readers:
                reader.replace_input_with(node, cast)


def _is_unsafe(conv: fx.Node) -> bool:
    own = arguments(conv)
    out, kernel, sizes = (shape_of(node)[2:] for node in (conv, own["weight"], own["input"]))
    stride, padding, dilation = (
        [*own[name]] * (len(kernel) // len(own[name])) for name in ("stride", "padding", "dilation")
    )
    if len(out) < len(kernel):  # unbatched
        out, sizes = shape_of(conv)[1:], shape_of(own["input"])[1:]
    if out[-1] == 1 and kernel[-1] > 1 and stride[-1] > 1:
        return True
    axes = zip(sizes, kernel, stride, padding, dilation, out, strict=True)
    return any(_has_padding_alone(*axis) for axis in axes)


def _has_padding_alone(size: int, kernel: int, stride: int, padding: int, dilation: int, out: int) -> bool:
    firsts = (place * stride - padding for place in range(out))
    reads = ([first + tap * dilation for tap in range(kernel)] for first in firsts)
    return any(not any(0 <= place < size for place in places) for places in reads)
