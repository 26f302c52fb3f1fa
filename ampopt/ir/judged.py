"""Passes that search: their choices are verified while they make them, by a judge."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ampopt.ir.beside import exact_outputs
from ampopt.ir.device_asserts import asserts_raised
from ampopt.ir.numerics import Check, fresh_draw, relative_error
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass, Result

DRAWS = 2
"""Number of random inputs, besides the examples, on which a program judges itself."""


class Judge(Protocol):
    """What a pass may ask while it searches."""

    @property
    def calls(self) -> Sequence[Sequence[Tensor]]:
        """The flat inputs of each call on which programs are verified: the examples first, ordinary draws."""

    def check(self, program: Program) -> Check:
        """The verification of a program, with the limit that it has to keep."""

    @property
    def exact_s(self) -> float:
        """Seconds of a call in float64, as far as known."""

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether more may be begun that takes so many seconds, as far as known."""


@dataclasses.dataclass(frozen=True)
class Judged(Pass):
    """A pass that searches among programs, each of which a judge verifies."""

    @abc.abstractmethod
    def apply_judged(self, program: Program, judge: Judge) -> Result:
        """`apply`, with the judge of the search that the pass is tried in."""

    def apply(self, program: Program) -> Result:
        """`apply_judged` where there is no search: the program's own graph in float64 is the judge."""
        return self.apply_judged(program, OwnJudge(program))


class OwnJudge:
    """Judges programs of a graph against that graph in float64, on its examples and on draws like them.

    The limit is a multiple of the error of the program that it is made from, which eager's is. Where that is
    over the lane's largest limit, the limit is `Limits.without_eager`.
    """

    def __init__(self, program: Program) -> None:
        generator = torch.Generator().manual_seed(0)
        draws = [tuple(fresh_draw(each, generator) for each in program.examples) for _ in range(DRAWS)]
        self.calls: list[tuple[Tensor, ...]] = [program.examples, *(draws if program.examples else [])]
        self._references = [exact_outputs(program, tensors) for tensors in self.calls]
        limits, own = program.lane.limits, self._error(program)
        allowed = min(limits.allowed(own), limits.largest)
        self._limit = allowed if own <= limits.largest else limits.without_eager

    exact_s = 0.0

    def check(self, program: Program) -> Check:
        """The largest relative error of an output, and the limit."""
        error = self._error(program)
        wrong = f"the error is {error:.2g}, over {self._limit:.2g}"
        return Check(error, self._limit, None if error <= self._limit else wrong)

    def has_time(self, seconds: float = 0.0) -> bool:
        """The search bounds itself."""
        return True

    def _error(self, program: Program) -> float:
        with asserts_raised(program.device):
            found = [program.run(*tensors) for tensors in self.calls]
        errors = [
            relative_error(output, reference)
            for outputs, references in zip(found, self._references, strict=True)
            for output, reference in zip(outputs, references, strict=True)
        ]
        return max((error if error == error else math.inf for error in errors), default=0.0)
