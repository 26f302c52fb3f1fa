"""What becomes of NaN and infinities of the inputs: they have to reach the outputs still."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal

from ampopt.ir.graph import where
from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import Check, is_rounded
from ampopt.ir.shapes import decides_by_values
from ampopt.measure.draws import Draw
from ampopt.measure.fault_masks import (
    Bools,
    Calls,
    Masks,
    finite_errors,
    joined_elements,
    left_in,
    lost_elements,
    share,
    with_others,
)
from ampopt.measure.original import Original, Run
from ampopt.system.wording import argument

Faults = Literal["keep", "exact", "ignore"]
"""How NaN and infinities must propagate.

Elements that are not finite in eager must stay so; others may become so ("keep"), or must not ("exact");
"ignore": not checked.
"""

ROUNDINGS_OF_FAULTS, ROUNDINGS_TO_SEE = 16, 8
"""The same number for NaN, whose position can change at a tie with a probability of a half.

The second: number of runs to see that something else than rounding moves it.
"""


class FaultCheck:
    """Compares where programs and the original are not finite, for inputs with a fault in one element.

    Their integers and booleans are compared by value: a class, a mask and a place say what NaN was taken for.
    What rounding alone changes without a fault, too, is no loss. So are numbers that stay finite, which a
    model may put in the place of faults.
    """

    def __init__(self, original: Original, faults: Faults, most: float) -> None:
        """`most`: an error of what stays finite that is allowed in every lane."""
        self._original, self._faults, self._most = original, faults, most
        self._masks: dict[tuple[Lane, str], Masks | None] = {}
        self._wholes: dict[tuple[Lane, str], Calls] = {}
        self._own: dict[tuple[Lane, str], list[float]] = {}
        self._rounded: dict[tuple[Lane, str], tuple[Masks, Iterator[tuple[int, Run]]]] = {}

    def check(self, run: Run, lane: Lane, check: Check, draws: Sequence[Draw]) -> Check:
        """The check with what becomes of NaN and infinities in one element of the inputs."""
        spread = None
        for draw in draws:
            if (masks := self._masks_of(lane, draw)) is None:
                continue
            outputs = self._original.steps(run, draw)
            found = self._left_in(outputs, lane, draw)
            is_whole = [not is_rounded(output) for output in outputs[0]]
            lost = lost_elements(found, masks.always)
            if any(count for count, whole in zip(lost, is_whole, strict=True) if whole):
                found = self._with_others(found, masks, run, lane, len(draw.calls))
            is_known = spread is not None and self._no_spreading is None  # that it spreads, as it may
            if not is_known or any(lost_elements(found, masks.always)):
                masks = self.explained(lane, draw, found, masks)
            for index, count in enumerate(lost_elements(found, masks.always)):
                if count:
                    reason = _reason(count, masks.count(index), whole=is_whole[index])
                    return Check(check.error, check.limit, f"output {index} with {draw.name}: {reason}")
            if (other := self._why_other(outputs, lane, draw)) is not None:
                return Check(check.error, check.limit, other)
            for index, joined in enumerate(joined_elements(found, masks.ever)):
                if joined and spread is None:
                    more, less = share(found, index), share(masks.always, index)
                    spread = (
                        f"{draw.name} of the inputs makes {more:.1%} of output {index} not finite, "
                        f"for {less:.1%} in eager"
                    )
            if spread is not None and (why_not := self._no_spreading) is not None:
                return Check(check.error, check.limit, f"{spread}, which {why_not}")
        return dataclasses.replace(check, spread=spread)

    @functools.cached_property
    def _no_spreading(self) -> str | None:
        """Why no other elements than in eager may become NaN; None where they may."""
        if self._faults == "exact":
            return f"{argument('nan', 'exact')} forbids"
        if (node := decides_by_values(self._original.captured.program)) is not None:
            return f"{where(node)} may take for another value and lose a fault"
        return None

    def _masks_of(self, lane: Lane, draw: Draw) -> Masks | None:
        """What a fault leaves in eager of the lane and in float64; None where the model takes no faults.

        In both: an algorithm of eager's own may spread a fault further.
        """
        if (lane, draw.name) not in self._masks:
            try:
                self._masks[lane, draw.name] = self._new_masks(lane, draw)
            except Exception:  # the model does not take such inputs
                self._masks[lane, draw.name] = None
        return self._masks[lane, draw.name]

    def _new_masks(self, lane: Lane, draw: Draw) -> Masks:
        eager, exact = self._eager(lane, draw), self._original.reference(draw)
        return Masks.of(*(self._left_in(calls, lane, draw) for calls in (eager, exact)))

    def _eager(self, lane: Lane, draw: Draw) -> Calls:
        """Eager's outputs; of these its integers and booleans, and its errors, are kept."""
        eager = self._original.steps(self._original.eager(lane), draw)
        self._own[lane, draw.name] = finite_errors(eager, self._original.reference(draw))
        self._wholes[lane, draw.name] = [
            [o.new_empty(0) if is_rounded(o) else o for o in outputs] for outputs in eager
        ]
        return eager

    def _wholes_of(self, lane: Lane, draw: Draw) -> Calls:
        """The integers and booleans of eager's outputs; nothing in the place of others."""
        if (lane, draw.name) not in self._wholes:
            self._eager(lane, draw)
        return self._wholes[lane, draw.name]

    def _left_in(self, outputs: Calls, lane: Lane, draw: Draw) -> Bools:
        return left_in(outputs, self._wholes_of(lane, draw), self._original.reference(draw))

    def _with_others(self, found: Bools, masks: Masks, run: Run, lane: Lane, in_a_row: int) -> Bools:
        """The masks with what differs from eager without a fault, too."""
        plain = Draw(f"the example {in_a_row} times", (self._original.captured.inputs,) * in_a_row)
        usual = self._original.steps(run, plain)
        return with_others(found, masks.always, usual, self._wholes_of(lane, plain))

    def _why_other(self, outputs: Calls, lane: Lane, draw: Draw) -> str | None:
        """Why numbers that stay finite with a fault are wrong; None if they are right."""
        exact, limit = self._original.reference(draw), max(lane.limits.largest, self._most)
        own, errors = self._own[lane, draw.name], finite_errors(outputs, exact)
        for index, (error, mine) in enumerate(zip(errors, own, strict=True)):
            if error > limit >= mine and not self._moves(lane, draw, index, error / 2):
                return (
                    f"output {index} with {draw.name}: the error {error:.2g} of what is finite is over "
                    f"{limit:.2g}: a sensor's fault would be taken for another value"
                )
        return None

    def _moves(self, lane: Lane, draw: Draw, index: int, least: float) -> bool:
        """Whether rounding alone changes as much of what is finite in an output."""
        exact = self._original.reference(draw)
        for moved in self._original.runs_rounded_anew(lane, range(ROUNDINGS_TO_SEE), within=True):
            with contextlib.suppress(Exception):  # a composite kernel may not bear to be taken apart
                if finite_errors(self._original.steps(moved, draw), exact)[index] >= least:
                    return True
        return False

    def explained(self, lane: Lane, draw: Draw, found: Bools, masks: Masks) -> Masks:
        """The masks with what rounding alone changes: NaN goes where the largest of a window lies.

        Eager is rounded anew until that explains all of `found`, so many times at the most. What has another
        cause is known sooner: the first times explain less than half of it.
        """
        first = masks.unexplained(found)
        if not first:
            return masks
        moving = self._original.runs_rounded_anew(lane, range(ROUNDINGS_OF_FAULTS), within=True)
        rounded, runs = self._rounded.setdefault((lane, draw.name), (masks, enumerate(moving, start=1)))
        while left := rounded.unexplained(found):
            if rounded.roundings >= ROUNDINGS_TO_SEE and 2 * left > first:
                break
            if (after := next(runs, None)) is None:
                break
            times, moved = after
            with contextlib.suppress(Exception):  # a composite kernel may not bear to be taken apart
                rounded = rounded.joined_by(self._left_in(self._original.steps(moved, draw), lane, draw))
            rounded = dataclasses.replace(rounded, roundings=times)
            self._rounded[lane, draw.name] = rounded, runs
        return rounded


def _reason(lost: int, count: int, *, whole: bool) -> str:
    """What is wrong where so many elements of so many are lost."""
    if whole:
        return f"{lost} integers or booleans are not eager's: a sensor's fault would be taken for a value"
    return f"{lost} of the {count} elements that are not finite in eager are: a sensor's fault would be lost"
