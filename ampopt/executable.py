"""A program made ready to be called: captured in a CUDA graph where it asks for one, else as it is."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ampopt.cuda_graphs import CapturedGraph
from ampopt.program import Program

Executable = Callable[..., tuple[Tensor, ...]]
"""Flat tensors in, flat tensors out, as the caller is promised."""


def executable(program: Program, *, static: bool = False) -> Executable:
    """What runs the program. `static`: outputs may be buffers that the next call overwrites.

    Raises PassError where a CUDA graph cannot be captured.
    """
    return CapturedGraph(program, static=static) if program.cuda_graph else program.run
