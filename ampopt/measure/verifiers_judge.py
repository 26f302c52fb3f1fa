"""The judge of passes that search: the verifier itself, until a time is over."""

from __future__ import annotations

import dataclasses
import functools
import math
import time

from torch import Tensor

from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.signature import own_copies
from ampopt.measure.verify import Verifier


@dataclasses.dataclass(frozen=True)
class VerifiersJudge:
    """Judges as the verification of a lane's programs does; `deadline` is on `time.perf_counter`'s clock.

    `bound` is a largest error beside the verification's limits.
    """

    verifier: Verifier
    lane: Lane
    deadline: float
    bound: float = math.inf

    @functools.cached_property
    def calls(self) -> list[tuple[Tensor, ...]]:
        """The inputs of every call of every draw, with the state that the original has reached before it.

        They are copies: a pass may write to them.
        """
        found = []
        for draw in self.verifier.draws:
            state = self.verifier.captured.initial_state
            for tensors, outputs in zip(draw.calls, self.verifier.reference(draw), strict=True):
                found.append(tuple(own_copies((*tensors, *state))))
                after = outputs[len(outputs) - len(state) :]
                state = tuple(b.to(a.dtype) for a, b in zip(state, after, strict=True))
        return found

    def check(self, program: Program) -> Check:
        """The errors of a program of the lane; faults are verified when the search has ended."""
        found = self.verifier.check_errors(program.run, self.lane)
        if not found.passed or found.error <= self.bound:
            return found
        return Check(found.error, self.bound, f"error {found.error:.2g} is over {self.bound:.2g}")

    @property
    def exact_s(self) -> float:
        """Seconds of the references of one draw."""
        return self.verifier.exact_s

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether the deadline will not be over in so many seconds."""
        return time.perf_counter() + seconds < self.deadline
