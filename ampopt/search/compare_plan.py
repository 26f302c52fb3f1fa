"""The cells of a comparison, and for each the passes without and with the one in question.

"alone" is a pass on the captured model with the lane's precision baked in. In the other two modes the passes
stand in the pipeline's order, and the launch passes on top of them, as they do when `optimize` is done:
on a GPU the gain of a kernel does not show while its launches take longer than it does. "cumulative" has the
rewrites up to the pass, "left out" all of them; of engines only the one in question is there, on top of all
rewrites, so that its two modes are the same comparison. A launch pass is compared with the rewrites alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ampopt.ir.lanes import Lane
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.transform import Engine, Family, Pass
from ampopt.measure.compared import MODES

Passes = tuple[Pass, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """A cell of the table: a pass in a lane and a mode."""

    lane: Lane
    mode: str
    step: Pass


@dataclasses.dataclass(frozen=True)
class Pair:
    """The passes of the two programs that a cell compares: without the pass in question, and with it."""

    before: Passes
    after: Passes

    def key(self, lane: Lane) -> tuple[str, ...]:
        """The lane and the passes by their names; equal for cells that compare the same programs."""
        return (lane.name, *(s.name for s in self.before), "→", *(s.name for s in self.after))


class Plan:
    """The cells of a comparison, in the order of the result's rows, and their programs."""

    def __init__(self, pipeline: Pipeline, lanes: Sequence[Lane]) -> None:
        self.pipeline, self.lanes = pipeline, tuple(lanes)
        self.cells = [Cell(lane, mode, step) for lane in lanes for mode in MODES for step in pipeline]
        self.kernels = tuple(step for step in pipeline.rewrites if step.family is Family.KERNEL)
        """The rewrites to operators that an engine may not be able to read."""

    def of(self, lane: Lane, modes: Sequence[str], steps: Sequence[Pass]) -> list[Cell]:
        """The cells of some passes in a lane and in some modes."""
        names = {step.name for step in steps}
        return [c for c in self.cells if c.lane is lane and c.mode in modes and c.step.name in names]

    def engine_groups(self, engines: Sequence[Pass]) -> list[list[Cell]]:
        """The cells of engines, those together that compare the same programs; the sequences come first."""
        return [
            self.of(lane, modes, (engine,))
            for engine in engines
            for modes in (("cumulative", "left out"), ("alone",))
            for lane in self.lanes
        ]

    def needs(self, lane: Lane) -> Passes:
        """What a pass stands on where it is alone: the pass that bakes the lane's precision, if any."""
        return tuple(step for step in self.pipeline.rewrites if step.name == lane.baked_by)

    def pair(self, cell: Cell, unreadable: Passes = ()) -> Pair:
        """The programs of a cell; `unreadable`: the rewrites that the engine in question cannot read."""
        step, rewrites, launches = cell.step, self.pipeline.rewrites, self.pipeline.launches
        if cell.mode == "alone":
            needs = tuple(s for s in self.needs(cell.lane) if s is not step)
            return Pair(needs, (*needs, step))
        if step.family is Family.LAUNCH:
            return Pair(rewrites, (*rewrites, step))
        if isinstance(step, Engine):
            readable = tuple(s for s in rewrites if s not in unreadable)
            return Pair((*rewrites, *launches), (*readable, step, *launches))
        place = rewrites.index(step)
        if cell.mode == "cumulative":
            return Pair((*rewrites[:place], *launches), (*rewrites[: place + 1], *launches))
        return Pair((*rewrites[:place], *rewrites[place + 1 :], *launches), (*rewrites, *launches))
