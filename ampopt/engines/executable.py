"""Makes a program callable: captured as a CUDA graph if it asks for one, else run directly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ampopt.engines.cuda_graphs import CapturedGraph, Outputs
from ampopt.engines.graph_per_size import GraphPerSize
from ampopt.engines.quick_call import HasQuickCall, Quick, plain
from ampopt.ir.program import Program

Executable = Callable[..., tuple[Tensor, ...]]
"""Takes and returns flat tensors, with the dtypes and formats that the caller expects."""


def executable(program: Program, *, outputs: Outputs = "copy") -> Executable:
    """The callable that runs the program.

    `outputs`: who owns the results of a capture, see `CapturedGraph`.

    Raises PassError if a CUDA graph cannot be captured; one for a range of sizes is, for each, in calls.
    """
    if not program.cuda_graph:
        return program.run
    return (GraphPerSize if program.sizes else CapturedGraph)(program, outputs=outputs)


def quick(program: Program, run: Executable, example: Tensor) -> Quick:
    """A fast path of the program's `run` for tensors that differ from its only example in values alone.

    Dtype, shape, strides and device are equal; they are plain tensors without negative or conjugate bit. An
    engine has its own fast path if no conversion is needed before or after it; settings are not set then,
    because they affect PyTorch only.
    """
    if isinstance(run, CapturedGraph):
        return run.quick(example)
    engine = program.engine
    if not isinstance(engine, HasQuickCall):
        return plain(run)
    converts = program.entry[0].convert(example) is not example or any(
        border.dtype is not dtype or border.memory_format is not torch.contiguous_format
        for border, dtype in zip(program.exit, engine.dtypes, strict=True)
    )
    return plain(run if converts else engine.quick(example, run))
