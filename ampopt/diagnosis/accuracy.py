"""Which layer loses accuracy in a lane: each operator's error against float64, alone and accumulated."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ampopt.ir.baking import bake
from ampopt.ir.beside import accumulated, contributions, observe
from ampopt.ir.graph import calls
from ampopt.ir.lanes import Lane
from ampopt.ir.origin import place_of
from ampopt.ir.program import Program
from ampopt.measure.entry import finite
from ampopt.system.interrupts import check_interrupted

RANKING = 3.0
"""How many times longer the ranking by derivatives may take than what comes before it."""

CALLS = 100
"""About as many calls in FP32 take as long as the errors of a lane: float64 and casts are slow on a CPU."""


@dataclasses.dataclass(frozen=True)
class LayerError:
    """An operator's relative error ‖y - ref‖ / ‖ref‖ against float64.

    `alone`: of its own arithmetic on exact inputs. `accumulated`: of its result when everything before it has
    erred, too. `at_outputs`: about how much of the outputs' error it makes; None if that was not computed.
    `largest`: the largest magnitude of its result. `overflows`: NaN or infinity came out of numbers.
    """

    name: str
    place: str
    alone: float
    accumulated: float
    at_outputs: float | None
    largest: float
    overflows: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        errors = {name: finite(getattr(self, name)) for name in ("alone", "accumulated", "largest")}
        return {**dataclasses.asdict(self), **errors}


def layer_errors(program: Program, lane: Lane, left_s: float) -> tuple[LayerError, ...]:
    """The errors of every operator that rounds a number, in a lane, the worst first.

    They are ranked by their part in the outputs' error where `left_s` seconds allow for the derivatives, else
    by their error alone; what overflows comes first. Raises what an operator raises that knows no float64.
    """
    started = time.perf_counter()
    program = lane.start(program)
    if lane.baked_by is not None:
        program, _ = bake(program, "amp")
    seen = observe(program, [program.examples])
    together = accumulated(program, program.examples)
    shares: dict[str, float] = {}
    spent_s = time.perf_counter() - started
    if (1 + RANKING) * spent_s < left_s:
        try:
            shares = contributions(program, [program.examples])
        except Exception as error:  # an operator without a derivative
            check_interrupted(error)
            shares = {}
    found = [
        LayerError(
            name=node.name,
            place=place_of(node),
            alone=seen[node.name].error,
            accumulated=together.get(node.name, 0.0),
            at_outputs=shares.get(node.name),
            largest=seen[node.name].largest,
            overflows=seen[node.name].overflows,
        )
        for node in calls(program.graph)
        if node.name in seen and (seen[node.name].error > 0 or seen[node.name].overflows)
    ]
    return tuple(sorted(found, key=lambda e: (not e.overflows, -(e.at_outputs or 0.0), -e.alone)))
