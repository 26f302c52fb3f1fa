"""Builds and verifies the two programs of a comparison's cell, or finds out why there is nothing to do.

A pass that fails, or whose program is wrong, has rows of its own: other passes' sequences go without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ampopt.ir.lanes import Lane
from ampopt.ir.transform import Engine, Pass
from ampopt.measure.compared import NOTHING
from ampopt.search.compare_plan import Cell, Plan
from ampopt.search.estimates import why_not
from ampopt.search.pair_timer import PairTimer, Timed
from ampopt.search.program_store import Built, NoTimeError, Outcome, ProgramStore


class CellBuilder:
    """The programs of one comparison's cells; see the module."""

    def __init__(
        self,
        plan: Plan,
        store: ProgramStore,
        timer: PairTimer,
        deadline: float,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`deadline` is on the clock `now`."""
        self._plan, self._store, self._timer, self._deadline, self._now = plan, store, timer, deadline, now
        self._broken: dict[Lane, set[str]] = {lane: set() for lane in plan.lanes}
        self._unread: dict[tuple[str, ...], dict[str, list[str]]] = {}

    def build(self, cell: Cell, reserved_s: float = 0.0) -> Timed | str:
        """The programs without and with the pass, verified; or the reason why there are none.

        `reserved_s`: the part of the time left that the pass should not use for measurements of its own.
        Raises NoTimeError if that cannot end in time.
        """
        step, lane = cell.step, cell.lane
        try:
            pair = self._plan.pair(cell, self._unreadable(lane, step))
            after, own = self._sequence(cell, pair.after, reserved_s)
            if own.built is None:
                return own.reason if own.failed else f"{NOTHING}: {own.reason}".removesuffix(": ")
            before, _ = self._sequence(cell, pair.before, reserved_s)
        except NoTimeError as error:
            start = self._store.start(lane)
            raise NoTimeError(error.needed_s + self._judging_s(start, start)) from None
        self._verify(before, after)
        makes_it_wrong = _is_right(before) and not _is_right(after)
        if cell.mode == "cumulative" and makes_it_wrong and step.name != lane.baked_by:
            self._broken[lane].add(step.name)
        return before, after

    def rewritten(self, lane: Lane, without: Sequence[Pass] = ()) -> Built:
        """The program with all rewrites that work, or without some of them."""
        built = self._store.start(lane)
        for step in self._plan.pipeline.rewrites:
            if step not in without and step.name not in self._broken[lane]:
                built = self._store.apply(built, step, self._left_s(built)).built or built
        return built

    def rehearse(self, cell: Cell) -> None:
        """Begin with what another process can do for an engine's cell."""
        built = self._engines_program(cell)
        self._store.rehearse(built, cell.step, self._left_s(built))

    def expected_s(self, cell: Cell) -> float:
        """About how long building an engine's cell takes; 0 where there is nothing to do."""
        built = self._engines_program(cell)
        seconds = self._store.expected_s(built, cell.step)
        return seconds + self._judging_s(built, built) if seconds else 0.0

    def _engines_program(self, cell: Cell) -> Built:
        """The program that an engine is applied to in a cell."""
        if cell.mode == "alone":
            return self._sequence(cell, self._plan.needs(cell.lane), 0.0)[0]
        return self.rewritten(cell.lane, self._unreadable(cell.lane, cell.step))

    def _unreadable(self, lane: Lane, engine: Pass) -> tuple[Pass, ...]:
        """The kernels that the program goes without because the engine cannot read them."""
        if not isinstance(engine, Engine) or why_not(engine, (whole := self.rewritten(lane)).program) is None:
            return ()
        kernels = tuple(step for step in self._plan.kernels if step.name in whole.names)
        if not kernels or why_not(engine, self.rewritten(lane, kernels).program) is not None:
            return ()
        engines = self._unread.setdefault(tuple(step.name for step in kernels), {})
        if lane.name not in (lanes := engines.setdefault(engine.name, [])):
            lanes.append(lane.name)
        return kernels

    def notes(self) -> list[str]:
        """Which engines run the graph without passes that they cannot read, and in which lanes."""
        return [
            f"without {' and '.join(names)}, which they cannot read: "
            + ", ".join(f"{engine} ({', '.join(lanes)})" for engine, lanes in engines.items())
            for names, engines in self._unread.items()
        ]

    def _sequence(self, cell: Cell, steps: Sequence[Pass], reserved_s: float) -> tuple[Built, Outcome]:
        """The program with these passes as far as they change something, and what the cell's own came to."""
        built, own = self._store.start(cell.lane), Outcome(None)
        for step in steps:
            is_own = step is cell.step
            if step.name in self._broken[cell.lane] and not is_own:
                continue
            left = self._left_s(built)
            anew = is_own and cell.mode == "alone"
            outcome = self._store.apply(built, step, left, spare_s=left - reserved_s, anew=anew)
            if is_own:
                own = outcome
                if outcome.built is None:
                    break
            elif outcome.failed and built.program.engine is None:
                self._broken[cell.lane].add(step.name)
            built = outcome.built or built
        return built, own

    def _left_s(self, built: Built) -> float:
        """The time left for changing a program, if it is to be verified and timed after that."""
        return self._deadline - self._now() - self._judging_s(built, built)

    def _judging_s(self, before: Built, made_of: Built) -> float:
        """About how long it takes to verify a program that is made of one, and to time it beside another."""
        return self._store.next_check_s(made_of) + self._timer.first_s([(before, made_of)])

    def _verify(self, before: Built, after: Built) -> None:
        """Verify both programs; the captured one itself is what the lane's limits are made of."""
        for built in (before, after):
            judging = self._store.check_s(built) + self._timer.first_s([(before, after)])
            if judging > self._deadline - self._now():
                raise NoTimeError(judging)
            if built.names:
                self._store.check(built)


def _is_right(built: Built) -> bool:
    """Whether nothing wrong was found in the program."""
    return built.check is None or built.check.passed
