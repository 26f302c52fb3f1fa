"""What passes come to ahead of their trial, so that compilers can begin on it in other processes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ampopt.ir.model_hash import are_equal
from ampopt.ir.program import Program
from ampopt.ir.shapes import Foretold
from ampopt.ir.transform import Applied, Pass, Result, replay
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")


class Foreseen:
    """Results of passes that were applied without a run of any program: shapes were told, not recorded.

    A first run may take seconds, in which libraries compile kernels; compilers work during that time. A trial
    takes the results if shapes come true. Otherwise the passes are applied once more, with the shapes that a
    run records: where they come to the same, compilers work on the right graph all the same.
    """

    def __init__(self, give_up: Callable[[], object] = lambda: None) -> None:
        """`give_up` is called where passes come to something else: what was begun on it is of no use."""
        self._give_up = give_up
        self._results: Applied = {}
        self._shapes = Foretold()
        self._asked: tuple[tuple[Pass, ...], Program, Program] | None = None

    def replay(self, steps: tuple[Pass, ...], program: Program) -> Program:
        """Apply passes in order, see `transform.replay`, and keep what each came to."""
        try:
            with self._shapes.telling():
                expected = replay(steps, program, self._results)
        except BaseException:
            self._results.clear()  # nothing would verify their shapes
            raise
        self._asked = steps, program, expected
        return expected

    def take(self, step: Pass, program: Program) -> Result | None:
        """What the pass came to on this program; None where that is not known."""
        if self._asked is not None and not self._shapes.came_true():
            self._apply_anew(*self._asked)
        self._asked = None
        return self._results.pop((program.lane, program.recipe, step), None)

    def _apply_anew(self, steps: tuple[Pass, ...], program: Program, expected: Program) -> None:
        self._results.clear()
        try:
            came_to = replay(steps, program, self._results)
        except Exception as error:  # the trial is going to tell
            check_interrupted(error)
            logger.debug("ampopt: what was foreseen cannot be made", exc_info=True)
            self._results.clear()
            self._give_up()
            return
        if came_to.recipe != expected.recipe or not are_equal(came_to.graph, expected.graph):
            self._give_up()
