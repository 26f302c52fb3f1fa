"""What passes come to ahead of their trial, so that compilers can begin on it in other processes."""

from __future__ import annotations

from collections.abc import Callable

from ampopt.ir.program import Program
from ampopt.ir.shapes import Foretold
from ampopt.ir.transform import Applied, Pass, Result, replay


class Foreseen:
    """Results of passes that were applied without a run of any program: shapes were told, not recorded.

    A first run may take seconds, in which libraries compile kernels; compilers work during that time. A trial
    takes the results if shapes come true.
    """

    def __init__(self, give_up: Callable[[], object] = lambda: None) -> None:
        """`give_up` is called where shapes are others: what was begun on these results is of no use."""
        self._give_up = give_up
        self._results: Applied = {}
        self._shapes = Foretold()

    def replay(self, steps: tuple[Pass, ...], program: Program) -> Program:
        """Apply passes in order, see `transform.replay`, and keep what each came to."""
        with self._shapes.telling():
            return replay(steps, program, self._results)

    def take(self, step: Pass, program: Program) -> Result | None:
        """What the pass came to on this program; None where that is not known, or shapes are others."""
        if self._results and not self._shapes.came_true():
            self._results.clear()
            self._give_up()
        return self._results.pop((program.lane, program.recipe, step), None)
