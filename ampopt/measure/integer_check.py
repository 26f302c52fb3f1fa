"""What becomes of integers that the examples do not have: large and negative ones, and dtypes' bounds."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence

from torch import Tensor

from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import Check
from ampopt.measure.draws import Draw
from ampopt.measure.original import Run


@dataclasses.dataclass(frozen=True)
class IntegerCheck:
    """Compares programs with the original on integers that the examples do not have.

    `ask` calls eager in the lane on a draw, and raises what it raises; `steps` calls a program; `check_draw`
    compares both.
    """

    draws: Sequence[Draw]
    ask: Callable[[Lane, Draw], object]
    steps: Callable[[Run, Draw], Sequence[Sequence[Tensor]]]
    check_draw: Callable[[Run, Lane, Draw], Check]

    def check(self, run: Run, lane: Lane, check: Check) -> Check:
        """The check with what the program makes of these integers.

        What eager refuses, an index out of range, the program has to refuse.
        """
        for draw in self.draws:
            try:
                self.ask(lane, draw)
            except Exception as refused:
                try:
                    self.steps(run, draw)
                except Exception:
                    continue
                reason = f"with {draw.name} in the inputs it answers, and eager does not: {_short(refused)}"
                return Check(check.error, check.limit, reason)
            try:
                found = self.check_draw(run, lane, draw)
            except Exception as failed:
                reason = f"with {draw.name} in the inputs it fails: {_short(failed)}"
                return Check(check.error, check.limit, reason)
            if not found.passed:
                return found
        return check


def _short(error: Exception) -> str:
    return textwrap.shorten(str(error), 120, placeholder=" …")
