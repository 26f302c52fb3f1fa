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

    That is dtype, shape, strides and device; they are plain tensors without negative or conjugate bit. Where
    there is a quicker way to take an only one, that way, else `run` itself. An engine has one where nothing
    is to be converted before or after it; settings are not set then, because they are PyTorch's.
    """
    if len(examples) != 1:
        return run
    (example,) = examples
    if isinstance(run, CapturedGraph):
        return run.quick(example)
    engine = program.engine
    if not isinstance(engine, OnnxEngine):
        return run
    converts = program.entry[0].convert(example) is not example or any(
        border.dtype is not dtype or border.memory_format is not torch.contiguous_format
        for border, dtype in zip(program.exit, engine.dtypes, strict=True)
    )
    return run if converts else engine.quick(example, run)
