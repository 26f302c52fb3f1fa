"""Puts back a program that a pass of another package has changed, and lets that pass fail."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampopt.errors import PassError
from ampopt.ir.kept_graph import KeptGraph
from ampopt.ir.kept_tensors import KeptTensors, tensors_of_program
from ampopt.ir.program import Program


def is_of_another_package(kind: type) -> bool:
    """Whether a class is not ampopt's own."""
    return kind.__module__.partition(".")[0] != __package__.partition(".")[0]


class KeptProgram:
    """What a program is before code of another package has it: its graph, its weights and its examples."""

    def __init__(self, program: Program) -> None:
        self._graph, self._tensors = KeptGraph(program.graph), KeptTensors(tensors_of_program(program))

    def put_back(self) -> str | None:
        """Make the program what it was; what was done to it, or None if nothing was."""
        changed, written = self._graph.put_back(), self._tensors.put_back()
        if written is not None:
            return (
                f"it has written to {written}, which other programs and the original read: a pass gives a "
                "graph new weights (ampopt.ir.graph.add_constant) and writes to none"
            )
        if changed is not None:
            return (
                "it changed the graph that it was given: edit a copy (ampopt.ir.graph.copy_of); the first "
                f"change was at {changed}"
            )
        return None


def with_program_kept(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A pass's `apply`, after which the program that it was given is what it was: its graph and its tensors.

    Later passes are tried on the same graph, and programs share their weights with the model that they are
    verified against: both would be wrong, and agree. Raises PassError where the pass has changed anything; it
    has to edit a copy, and to register new weights.
    """

    @functools.wraps(apply)
    def guarded(self: Any, program: Program, *more: Any, **options: Any) -> Any:
        kept = KeptProgram(program)
        failed: Exception | None = None
        try:
            result = apply(self, program, *more, **options)
        except Exception as error:
            failed = error
        finally:  # Ctrl-C, too
            changed = kept.put_back()
        if changed is not None:
            raise PassError(changed) from failed
        if failed is not None:
            raise failed
        return result

    return guarded
