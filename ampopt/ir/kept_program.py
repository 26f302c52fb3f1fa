"""Puts back a program that a pass of another package has changed, and lets that pass fail."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ampopt.errors import PassError
from ampopt.ir.kept_graph import KeptGraph
from ampopt.ir.kept_weights import KeptWeights
from ampopt.ir.program import Program


def with_program_kept(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A pass's `apply`, after which the program that it was given is what it was: its graph and its tensors.

    Later passes are tried on the same graph, and programs share their weights with the model that they are
    verified against: both would be wrong, and agree. Raises PassError where the pass has changed anything; it
    has to edit a copy, and to register new weights.
    """

    @functools.wraps(apply)
    def guarded(self: Any, program: Program, *more: Any, **options: Any) -> Any:
        graph, weights = KeptGraph(program.graph), KeptWeights(program)
        failed: Exception | None = None
        try:
            result = apply(self, program, *more, **options)
        except Exception as error:
            failed = error
        finally:  # Ctrl-C, too
            changed, written = graph.put_back(), weights.put_back()
        if written is not None:
            raise PassError(
                f"{self.name} has written to {written}, which other programs and the original read: a pass "
                "gives a graph new weights (ampopt.ir.graph.add_constant) and writes to none"
            ) from failed
        if changed is not None:
            raise PassError(
                "it changed the graph that it was given: edit a copy (ampopt.ir.graph.copy_of); the first "
                f"change was at {changed}"
            ) from failed
        if failed is not None:
            raise failed
        return result

    return guarded
