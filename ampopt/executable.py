"""A program made ready to be called: captured in a CUDA graph where it asks for one, else as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ampopt.cuda_graphs import CapturedGraph, Outputs
from ampopt.onnx_engine import OnnxEngine
from ampopt.program import Program

Executable = Callable[..., tuple[Tensor, ...]]
"""Flat tensors in, flat tensors out, as the caller is promised."""


def executable(program: Program, *, outputs: Outputs = "copy") -> Executable:
    """What runs the program. `outputs`: who owns them where it is captured, see `CapturedGraph`.

    Raises PassError where a CUDA graph cannot be captured.
    """
    return CapturedGraph(program, outputs=outputs) if program.cuda_graph else program.run


def quick(program: Program, run: Executable, *examples: Tensor) -> Executable:
    """The program's `run` for tensors that are like the examples in all but their numbers.

    That is class, dtype, shape, strides and device. Where an engine has a quicker way to take them, and
    nothing is to be converted before or after it, that way; else `run` itself. Settings are not set, because
    they are PyTorch's.
    """
    engine = program.engine
    if not isinstance(engine, OnnxEngine) or len(examples) != 1:
        return run
    converts = program.entry[0].convert(examples[0]) is not examples[0] or any(
        border.dtype is not dtype or border.memory_format is not torch.contiguous_format
        for border, dtype in zip(program.exit, engine.dtypes, strict=True)
    )
    return run if converts else engine.quick(examples[0], run)
