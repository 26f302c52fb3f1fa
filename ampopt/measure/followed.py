"""Errors against the original that makes a program's own choices, where these are as good.

An operator that tells places (`topk`, `argmax`, `sort`) takes others where rounding swaps values that are
nearly alike. All that is computed from these places is then another result: two-stage detectors decode other
queries, a network on points looks at other neighbours. Every program of a lane does so, eager among them.

So where a program is too far from the original, its choices are written down, and the original runs in
float64 again and makes them, too. A program passes if its outputs are near those, as near as eager is to the
original that makes eager's choices, and if every choice is as good as that of float64:

- each value that it takes is near the one of that rank in float64: not farther than two values can come to
  lie when each is rounded by `Limits.multiple` of the most that eager's were in the lane: those of values
  that are comparable, see `ir.choice_roundings`;
- the error of all that it takes is within the limit of an output, and counts as that of one;
- no place is taken twice, and of equal values the first, where PyTorch says so.

Correct because: the original with other places is the original for scores that differ by no more than
`Limits.multiple` times the lane's rounding of them. What is computed otherwise from the same places is as far
from it as ever, and so is a program whose choices cannot be seen, or are not those of the run that is judged.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ampopt.errors import first_line
from ampopt.ir.choice_roundings import differences, distance
from ampopt.ir.choices import Choice, Follow, FollowedChoices, seen_in
from ampopt.ir.choosers import Chooser, makes_choices
from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import relative_error
from ampopt.ir.shapes import record_shapes
from ampopt.measure.draws import Draw
from ampopt.measure.original import HasOperators, Original, Run
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")

FOLLOWED_FROM = 1e-2
"""Largest error of an output that is told as it is: that which `precision="auto"` accepts, see `Limits`."""

Steps = Sequence[Sequence[Tensor]]
Errors = Callable[[Steps, Steps, Draw], list[float]]
"""The errors of outputs against a reference, for each call of a draw."""


@dataclasses.dataclass(frozen=True)
class Followed:
    """The error of each output against the original that makes the same choices, and these."""

    errors: list[float]
    follows: Sequence[Follow]

    @property
    def is_other(self) -> bool:
        """Whether a choice is another one than float64's."""
        return any(follow.moved for follow in self.follows)

    @functools.cached_property
    def chosen(self) -> dict[int, float]:
        """The error of the values that each choice takes, by its number; infinite for NaN."""
        errors = {follow.number: relative_error(*follow.pairs) for follow in self.follows}
        return {number: error if error == error else math.inf for number, error in errors.items()}

    @property
    def error(self) -> float:
        """The largest error, of an output or of what is chosen."""
        return max((*self.errors, *self.chosen.values()), default=0.0)

    def is_as_good(self, lane: Lane, owns: Sequence[Followed]) -> bool:
        """Whether each choice is as good as float64's, within what one of eager's own in the lane allows."""
        by_number = [{(follow.number, follow.key): follow for follow in own.follows} for own in owns]
        most = 2 * lane.limits.multiple
        for follow in self.follows:
            own = [found for each in by_number if (found := each.get((follow.number, follow.key)))]
            limit = max((_limit(lane, each.error) for each in own), default=-math.inf)
            if not self.chosen[follow.number] <= limit or not any(_is_near(follow, o, most) for o in own):
                return False
        return True


def _is_near(follow: Follow, own: Follow, most: float) -> bool:
    """Whether each value that is taken is near that of its rank, for what eager's own are rounded by."""
    if own.roundings is None or not math.isfinite(own.roundings.largest):
        return False
    a, b = follow.pairs
    rounded = own.roundings.of_values(torch.maximum(a.abs(), b.abs()).double())
    return bool((differences(a, b) <= most * rounded).all())


def _limit(lane: Lane, own: float) -> float:
    return min(lane.limits.allowed(own), lane.limits.largest)


@dataclasses.dataclass(frozen=True)
class Judged:
    """The outputs of a program, each with its error and limit.

    `note` tells why they are right though they are far from the original in float64. `is_followed`: the
    errors are against the original that makes the same choices; `chosen` is the error of what these take.
    """

    found: list[tuple[int, float, float]]
    note: str | None = None
    is_followed: bool = False
    chosen: float = 0.0

    @property
    def error(self) -> float:
        """The largest error."""
        return max((self.chosen, *(error for _, error, _ in self.found)))

    @property
    def passed(self) -> bool:
        """Whether each error is within its limit."""
        return all(error <= limit for _, error, limit in self.found)


class Following:
    """The original that makes the choices of others."""

    def __init__(self, original: Original, usual: Sequence[Draw], errors: Errors) -> None:
        """`usual`: the example, and random inputs like it."""
        self._original, self._usual, self._errors = original, usual, errors
        self._eager: dict[tuple[Lane, str], Followed | None] = {}
        self.applies = makes_choices(original.captured.program.graph)

    def followed(self, run: Run, draw: Draw) -> Followed | None:
        """The errors of a run; None where it makes no choices, or the original cannot make them.

        Its outputs are those of a call that nothing watches: compiled code may be another in a mode.
        """
        if not self.applies:
            return None
        seen = self._seen(run.by_operators if isinstance(run, HasOperators) else run, draw)
        if seen is None or not seen[1]:
            return None
        return self._against(self._original.steps(run, draw), seen[1], draw)

    def eager(self, lane: Lane, draw: Draw) -> Followed | None:
        """Eager in a lane, with how far it rounds what it chooses from."""
        if not self.applies:
            return None
        if (lane, draw.name) not in self._eager:
            seen = self._seen(self._original.eager(lane), draw, with_rows=True)
            self._eager[lane, draw.name] = None if seen is None else self._against(*seen, draw)
        return self._eager[lane, draw.name]

    def own(self, lane: Lane, draw: Draw) -> Followed | None:
        """As `eager`; None where its own choices are over the lane's largest error."""
        found = self.eager(lane, draw)
        is_right = found is not None and max(found.chosen.values()) <= lane.limits.largest
        return found if is_right else None

    def _seen(self, run: Run, draw: Draw, *, with_rows: bool = False) -> tuple[Steps, list[Choice]] | None:
        """What a run gives, and its choices; None where it fails because it is watched."""
        try:
            return seen_in(lambda: self._original.steps(run, draw), with_rows=with_rows)
        except Exception as error:  # of a session that is to tell the choices, perhaps
            check_interrupted(error)
            logger.debug("ampopt: choices are not seen: %s", first_line(error))
            return None

    def _against(self, outputs: Steps, choices: Sequence[Choice], draw: Draw) -> Followed | None:
        if not choices:
            return None
        mode = FollowedChoices(choices)
        try:
            reference = self._original.reference_within(draw, mode)
        except Exception as error:  # places that the original cannot compute with
            check_interrupted(error)
            logger.debug("ampopt: choices are not followed: %s", first_line(error))
            return None
        if not mode.is_done or not all(follow.is_valid for follow in mode.follows):
            return None
        return Followed(self._errors(outputs, reference, draw), mode.follows)

    def judged(self, run: Run, lane: Lane, draw: Draw) -> Judged | None:
        """The outputs of a program of the lane; None where its choices are not other ones, or not as good."""
        found = self.followed(run, draw)
        if found is None or not found.is_other:
            return None
        owns = [own for each in (*self._usual, draw) if (own := self.own(lane, each)) is not None]
        if len(owns) <= len(self._usual):
            return None
        *usual, mine = owns
        if not found.is_as_good(lane, usual if draw in self._usual else [mine]):
            return None
        rows = []
        for output, error in enumerate(found.errors):
            by_eager = max(statistics.median_low([e.errors[output] for e in usual]), mine.errors[output])
            rows.append((output, error, _limit(lane, by_eager)))
        return Judged(rows, self._told(found, mine, draw), True, max(found.chosen.values()))

    def _chooser(self, follow: Follow) -> Chooser | None:
        found = [chooser for chooser in self._choosers if chooser.key == follow.key]
        return found[follow.among % len(found)] if found else None  # a draw may have several calls

    @functools.cached_property
    def _choosers(self) -> list[Chooser]:
        return Chooser.all_in(record_shapes(self._original.captured.program))

    def _told(self, found: Followed, own: Followed, draw: Draw) -> str:
        """What the choice takes otherwise that does so most, of those whose places are read."""
        choosers = [self._chooser(follow) for follow in found.follows]
        pairs = list(zip(found.follows, choosers, strict=True))
        pairs = [
            (follow, chooser) for follow, chooser in pairs if chooser is None or chooser.is_read
        ] or pairs
        most, chooser = max(pairs, key=lambda pair: pair[0].moved)
        place = chooser.where if chooser is not None else most.key.kind
        roundings = next((each.roundings for each in own.follows if each.number == most.number), None)
        rounding = roundings.largest if roundings is not None else 0.0
        others, count = most.others, most.places.numel()
        what = (
            f"takes {others} other ones of {count} places" if others else f"orders {count} places otherwise"
        )
        return (
            f"{place} {what} with {draw.name}: their values "
            f"are within {distance(*most.pairs):.1e} of float64's, which eager rounds by {rounding:.1e}; "
            "errors are against the original that takes the same"
        )
