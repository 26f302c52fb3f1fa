"""A program made ready to be called: captured in a CUDA graph where it asks for one, else as it is."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ampopt.cuda_graphs import CapturedGraph, Outputs
from ampopt.program import Program

Executable = Callable[..., tuple[Tensor, ...]]
"""Flat tensors in, flat tensors out, as the caller is promised."""


def executable(program: Program, *, outputs: Outputs = "copy") -> Executable:
    """What runs the program. `outputs`: who owns them where it is captured, see `CapturedGraph`.

    Raises PassError where a CUDA graph cannot be captured.
    """
    return CapturedGraph(program, outputs=outputs) if program.cuda_graph else program.run
