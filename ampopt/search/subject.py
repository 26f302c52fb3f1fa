"""A program under trial, with its executable for each clock."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ampopt.engines.executable import Executable, executable, quick
from ampopt.engines.graph_capture import ReplayedProgram
from ampopt.errors import AmpoptError
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.measure.clocks import REST_S


def rest_s(program: Program) -> float:
    """Seconds without calls before a program is timed: on a CPU an engine has threads of its own."""
    return REST_S if program.engine is not None and program.device.type == "cpu" else 0.0


class Subject:
    """A program under trial: its executable as its user calls it, and its replay for the device clock."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.run: Executable = executable(program)
        self._answer: Callable[..., object] = self.run
        if len(program.examples) == 1:
            self._answer = quick(program, self.run, program.examples[0])(torch.is_tensor, tuple)
        self.device = program.device
        self._replayed: ReplayedProgram | None = None
        self._replays = self.device.type == "cuda"
        self.settled: Check | None = None
        """Its verification far outside of the examples' range, which it has passed; None before."""

    def replayed(self) -> ReplayedProgram | None:
        """The program in a CUDA graph, for the device clock; None if it cannot be captured."""
        if self._replays and self._replayed is None:
            try:
                self._replayed = ReplayedProgram(self.program)
            except AmpoptError:
                self._replays = False
        return self._replayed

    def call(self) -> object:
        """One call on the example inputs."""
        return self._answer(*self.program.examples)
