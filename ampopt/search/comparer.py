"""Fills the table of a comparison, and plans the time for it.

Rewrites come first, engines last. Every cell gets few samples at first; the time that is left goes to the
cells with the widest intervals. Nothing is begun that is not expected to end in time.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ampopt.errors import first_line
from ampopt.measure.changes import INTERRUPTED, WITHOUT
from ampopt.measure.compared import ComparedPass
from ampopt.measure.rounds import Told
from ampopt.search.cell_builder import CellBuilder
from ampopt.search.choices import STARTING_S, is_risky
from ampopt.search.compare_plan import Cell, Plan
from ampopt.search.pair_timer import PairTimer, Timed
from ampopt.search.program_store import NoTimeError, ProgramStore
from ampopt.search.trials import Progress
from ampopt.system.interrupts import check_interrupted, interruptible
from ampopt.system.wording import argument

_T = TypeVar("_T")

BATCH_S = 4.0
"""Cells are timed together until a batch would take longer than this time in seconds."""

MORE = 1.25
"""The time for cells that were left out counts this many times, because estimates are often too short."""

ORDER = ("cumulative", "left out", "alone")
"""The modes as they are filled: passes measure for themselves in the sequence, and others replay that."""


class Comparer:
    """The cells of one comparison, and what was found for them; see the module."""

    def __init__(
        self,
        plan: Plan,
        store: ProgramStore,
        *,
        device: torch.device,
        started: float,
        deadline: float,
        tell: Progress,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`started` and `deadline` are on the clock `now`."""
        self._plan, self._store, self._tell, self._now = plan, store, tell, now
        self._started, self._deadline = started, deadline
        self._timer = PairTimer(device, deadline, store.silence, now)
        self._builder = CellBuilder(plan, store, self._timer, deadline, now)
        self._pairs: dict[Cell, Timed] = {}
        self._reasons: dict[Cell, str] = {}
        self._missing_s: dict[Cell, float] = {}
        self.interrupted = False
        self._took_s = 0.0

    def run(self) -> None:
        """Fill what the time allows; Ctrl-C ends it."""
        try:
            with interruptible():
                self._fill_rewrites()
                self._fill_engines()
                while self._timer.refine(self._pairs.values()):
                    check_interrupted()
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._took_s = self._now() - self._started

    def rows(self) -> tuple[ComparedPass, ...]:
        """A row for every cell: what was measured, or why nothing was."""
        return tuple(self._row(cell) for cell in self._plan.cells)

    def notes(self) -> list[str]:
        """What the rows do not say: what engines cannot read, and the budget that is missing."""
        notes = [*self._builder.notes(), *self._store.hints]
        left = sum(row.reason == INTERRUPTED for row in self.rows())
        missing, among = left or len(self._missing()), f"of {len(self._plan.cells)} cells are not filled"
        if self.interrupted:
            notes.append(f"interrupted: {missing} {among}" if left else "interrupted: times are less sure")
        elif missing:
            notes.append(f"{missing} {among}: {self._budget_to_fill()} would fill them")
        return notes

    def _fill_rewrites(self) -> None:
        steps = (*self._plan.pipeline.rewrites, *self._plan.pipeline.launches)
        for mode in ORDER:
            for lane in self._plan.lanes:
                self._fill(self._plan.of(lane, (mode,), steps))
            if mode == ORDER[0]:
                for group in self._engine_groups():
                    self._try(self._builder.rehearse, group[0])

    def _fill_engines(self) -> None:
        """The engines that take the least time first, each in all lanes."""
        groups = self._engine_groups()
        expected = {group[0]: self._try(self._builder.expected_s, group[0]) or 0.0 for group in groups}
        for place, group in enumerate(groups):
            later = [cells[0] for cells in groups[place + 1 :] if expected[cells[0]]]
            starting = STARTING_S if any(is_risky(cell.step) for cell in later) else 0.0
            self._fill(group, sum(expected[cell] for cell in later) + starting)

    def _engine_groups(self) -> list[list[Cell]]:
        """The cells of engines as they are filled: those of what takes long last."""
        engines = self._plan.pipeline.engines
        seconds: dict[str, float] = collections.defaultdict(float)
        for cell, *_ in self._plan.engine_groups(engines):
            seconds[cell.step.name] += self._try(self._builder.expected_s, cell) or 0.0
        return self._plan.engine_groups(sorted(engines, key=lambda engine: seconds[engine.name]))

    def _try(self, work: Callable[[Cell], _T], cell: Cell) -> _T | None:
        """Look ahead at an engine's cell; what fails now will tell when the cell is filled."""
        try:
            return work(cell)
        except Exception as error:
            check_interrupted(error)
            return None

    def _fill(self, cells: Sequence[Cell], reserved_s: float = 0.0) -> None:
        """Build and verify the programs of cells, and time them together.

        `reserved_s`: the time that passes which measure leave to others.
        """
        waiting: list[Cell] = []
        for cell in cells:
            self._tell(cell.lane.name, f"{cell.step.name} ({cell.mode})")
            check_interrupted()
            try:
                found = self._builder.build(cell, reserved_s)
            except NoTimeError as error:
                self._missing_s[cell] = error.needed_s
            except Exception as error:
                self._fails(cell, error)
            else:
                if isinstance(found, str):
                    self._reasons[cell] = found
                    continue
                self._pairs[cell] = found
                waiting.append(cell)
                if self._timer.first_s(self._pairs_of(waiting)) > BATCH_S:
                    self._time(waiting)
                    waiting = []
        self._time(waiting)

    def _time(self, cells: Sequence[Cell]) -> None:
        """Time cells in one batch, as many as there is time for; what fails in it fails alone."""
        cells = [cell for cell in cells if self._timer.told(self._pairs[cell]) is None]
        while cells and (needed := self._timer.first_s(self._pairs_of(cells))) > self._deadline - self._now():
            self._missing_s[cells.pop()] = needed
        try:
            if cells:
                self._timer.time(self._pairs_of(cells))
        except Exception as error:
            if len(cells) == 1:
                self._fails(cells[0], error)
                return
            check_interrupted(error)
            for cell in cells:
                self._time([cell])

    def _pairs_of(self, cells: Sequence[Cell]) -> list[Timed]:
        return [self._pairs[cell] for cell in cells]

    def _fails(self, cell: Cell, error: Exception) -> None:
        check_interrupted(error)
        self._reasons[cell] = f"failed: {first_line(error)}"

    def _missing(self) -> dict[Cell, float]:
        """The cells that there was no time for, and about how long they take."""
        return {cell: seconds for cell, seconds in self._missing_s.items() if self._told(cell) is None}

    def _told(self, cell: Cell) -> Told | None:
        return self._timer.told(self._pairs[cell]) if cell in self._pairs else None

    def _budget_to_fill(self) -> str:
        """The time budget in which all cells would be filled, in tens of seconds; the same for all rows."""
        once = {self._plan.pair(c).key(c.lane): seconds for c, seconds in self._missing().items()}
        seconds = self._took_s + MORE * sum(once.values())
        whole = max(seconds, self._deadline - self._started + 1.0)
        return argument("budget_s", 10 * math.ceil(whole / 10.0))

    def _row(self, cell: Cell) -> ComparedPass:
        lane, name = cell.lane.name, cell.step.name
        if (told := self._told(cell)) is not None:
            check, without = self._store.check(self._pairs[cell][1]), self._pairs[cell][0].check
            reason = f"({check.reason})" if check.reason else ""
            if not reason and without is not None and without.reason:
                reason = f"{WITHOUT}{without.reason})"
            return ComparedPass(lane, cell.mode, name, told.after, told.gain, check.error, reason)
        reason = self._reasons.get(cell, INTERRUPTED)
        if cell in self._missing_s and not self.interrupted:
            reason = f"not tried: no time left ({self._budget_to_fill()} would do)"
        return ComparedPass(lane, cell.mode, name, None, None, None, reason)
