"""The state of the search in one lane: the program to be served, and the one that rewrites build on."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics

from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass, replay
from ampopt.search.subject import Subject

MOST_MADE = 6
"""Programs of a lane that are kept to build others on: each may have weights of its own."""


@dataclasses.dataclass
class LaneState:
    """What is known in a lane so far.

    `best` is the fastest program, as it would be served. `graph` is the best rewritten program before any
    engine or launch: rewrites are compared with it, engines and launches start from it. `base` is the
    captured program.
    """

    lane: Lane
    best: Subject
    graph: Subject
    base: Program
    call_s: float = 0.0
    """Time in seconds of a call of `graph`, as far as known; it estimates the time of trials."""
    best_s: float | None = None
    """Time in seconds of a call of `best` in its own trial; None before the first one is kept."""
    judging: list[float] = dataclasses.field(default_factory=list)
    """Time in seconds of verifying and timing, for each trial so far."""
    too_slow: list[Pass] = dataclasses.field(default_factory=list)
    """Passes that were correct but gained nothing, with their measurements in their fields."""
    at_a_loss: list[Pass] = dataclasses.field(default_factory=list)
    """Passes that were kept with a small loss, because later ones may build on them."""
    founded: int = 0
    """The number of first passes in its recipes without which the lane is wrong, see `search.rescue`."""
    least_error: float = math.inf
    """The least error of its right programs so far."""
    bound: float = math.inf
    """Largest error with which the lane may be chosen, beside the verification's limits."""
    check: Check | None = None
    """The final check of the best program by `PassManager.settle`; None before."""
    former: list[Subject] = dataclasses.field(default_factory=list)
    """Programs that were the best before the present one, the latest last."""
    rivals: list[Subject] = dataclasses.field(default_factory=list)
    """Right programs that noise may have cost the place of the best, see `search.play_off`."""
    made: dict[tuple[Pass, ...], Program] = dataclasses.field(default_factory=dict)
    """The latest programs by the recipes that give them."""

    @property
    def judging_s(self) -> float:
        """Expected time in seconds to verify and time a program, from the trials so far; 0 before them."""
        return statistics.median(self.judging) if self.judging else 0.0

    def remember(self, recipe: tuple[Pass, ...], program: Program) -> Program:
        """Keep the program that a recipe makes of `base`, for `replayed`; not of passes without a hash."""
        with contextlib.suppress(TypeError):
            self.made.pop(recipe, None)
            self.made[recipe] = program
        while len(self.made) > MOST_MADE:
            del self.made[next(iter(self.made))]
        return program

    def replayed(self, recipe: tuple[Pass, ...]) -> Program:
        """What a recipe makes of `base`; what was made of its first passes is not made again."""
        known = 0
        with contextlib.suppress(TypeError):
            known = next((n for n in range(len(recipe), 0, -1) if recipe[:n] in self.made), 0)
        start = self.made[recipe[:known]] if known else self.base
        return self.remember(recipe, replay(recipe[known:], start))
