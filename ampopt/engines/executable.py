"""Makes a program callable: captured as a CUDA graph if it asks for one, else run directly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ampopt.engines.cuda_graphs import CapturedGraph, Outputs
from ampopt.engines.quick_call import HasQuickCall, Quick, plain
from ampopt.ir.program import Program

Executable = Callable[..., tuple[Tensor, ...]]
"""Flat tensors in, flat tensors out, as the caller is promised."""


def executable(program: Program, *, outputs: Outputs = "copy") -> Executable:
    """What runs the program. `outputs`: who owns them where it is captured, see `CapturedGraph`.

    Raises PassError where a CUDA graph cannot be captured.
    """
    return CapturedGraph(program, outputs=outputs) if program.cuda_graph else program.run


def quick(program: Program, run: Executable, example: Tensor) -> Quick:
    """How the program's `run` answers tensors that are like its only example in all but their numbers.

    That is dtype, shape, strides and device; they are plain tensors without negative or conjugate bit. An
    engine has a quicker way where nothing is to be converted before or after it; settings are not set then,
    because they are PyTorch's.
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
