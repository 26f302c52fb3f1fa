"""Copies results of an engine that share memory, where those of its graph do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ampopt.ir.aliases import joined
from ampopt.ir.program import Program


class Apart:
    """An engine of whose results some, by their places, are copied: it has computed equal ones once."""

    def __init__(self, engine: Callable[..., Any], places: Sequence[int]) -> None:
        self.engine, self.places = engine, tuple(places)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results, each in memory of its own but for views of others in the graph."""
        results = list(self.engine(*tensors))
        for place in self.places:
            results[place] = results[place].clone()
        return tuple(results)


def with_results_apart(program: Program, engine: Callable[..., Any]) -> Callable[..., Any]:
    """The engine, made for a program without one, itself where it keeps apart what the program's graph does.

    It is run on the examples, and the graph where results of the engine share memory.
    """
    with program.scope():
        entered = [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]
        found = joined(engine(*entered))
        wrong = found - joined(program.function(*entered)) if found else found
    return Apart(engine, sorted({other for _, other in wrong})) if wrong else engine
