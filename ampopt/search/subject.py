"""A program under trial, with its executable for each clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch

from ampopt.engines.executable import Executable, executable, quick
from ampopt.engines.graph_capture import ReplayedProgram
from ampopt.errors import AmpoptError
from ampopt.ir.kept_program import KeptProgram, is_of_another_package
from ampopt.ir.kept_tensors import KeptTensors
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.measure.clocks import REST_S

T = TypeVar("T")


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

    def watched(self, work: Callable[[], T]) -> tuple[T, str | None]:
        """What work with the program gives, and what its calls have written to, which is put back; or None.

        It may be an example; or, where passes of other packages made the program, a weight or the graph.
        """
        program = self.program
        is_foreign = any(is_of_another_package(type(step)) for step in program.recipe)
        examples = KeptTensors((f"input {place}", each) for place, each in enumerate(program.examples))
        rest = KeptProgram(program) if is_foreign else None
        try:
            found = work()
        finally:
            written = examples.put_back()
            changed = None if rest is None else rest.put_back()
        return found, changed if written is None else f"it writes to {written}"

    def checked(self, check: Callable[[], Check]) -> Check:
        """A verification of the program, with what it has written to as the reason if it has."""
        found, written = self.watched(check)
        return found if written is None else dataclasses.replace(found, reason=written)
