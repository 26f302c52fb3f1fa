"""What the original's own errors allow: those in a lane, and what rounding alone makes of its outputs."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from ampopt.ir.capture import Captured
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.numerics import finite_norm, relative_error, roundings_of_sums
from ampopt.ir.signature import own_copies
from ampopt.measure.draws import CALLS_IN_A_ROW, Draw, plain_draws, range_draws
from ampopt.measure.followed import FOLLOWED_FROM, Followed, Following
from ampopt.measure.original import Original, Run
from ampopt.system.flags import rounds_to_tf32
from ampopt.system.interrupts import check_interrupted

AS_FAR = 2.0
"""Largest ratio of a program's error to eager's change by rounding, if the error is over the limit.

Outputs of zeros have an error of 1, which never passes.
"""

LEAST_NORM = 1e-6
"""Outside of the examples' range, an output's norm counts as at least this share of that on the examples."""

CANCELLED = 0.05
"""Far outside, rounding may decide a result that is wrong by at most this share of its usual norm."""

ROUNDINGS = 6
"""Number of eager runs with changed rounding, to learn how far rounding alone can change an output.

On a CPU such a run of a large network takes 2 to 4 times as long as eager. One of an encoder and decoder has
even chances to move the place of a pooling's largest number by which ONNX Runtime's right results differ.
"""


class OwnErrors(Original):
    """The original, its errors in each lane, and the limits that follow from them.

    The limit for each output is a small multiple of eager's own error in the same lane, and at most
    `Limits.largest`. A model with a discontinuity (the arg-max of a pooling window) can make a large jump
    because of rounding alone, which eager happens not to make. So if a program is over the limit on a draw,
    eager itself runs on that draw with changed rounding of weights and inputs, and with sums changed as
    another order of their terms may, and the change of its outputs counts as eager's own error. A lane in
    which eager overflows, or is too inexact on most draws, has another yardstick, see `yardstick`. Outside of
    the examples' range all that it computes is rounded anew, too: it may amplify rounding there.
    """

    def __init__(
        self, model: nn.Module, captured: Captured, *, tolerance: float | None, draws: int, seed: int
    ) -> None:
        """Compute the references. `model`, a private copy on the program's device, is not called itself.

        `draws`: the number of random inputs like the examples, beside these.
        """
        self.tolerance = tolerance
        super().__init__(model, captured)
        self._own: dict[tuple[Lane, str], list[float]] = {}
        self._told_errors: dict[Lane, float] = {}
        self._called: dict[str, list[float]] = {}
        self._unlimited: dict[tuple[Lane, str], list[float]] = {}
        self._jumps: dict[tuple[Lane, str, bool], tuple[int, list[float]]] = {}
        self.in_a_row = CALLS_IN_A_ROW if captured.lifted else 1
        self.inputs = tuple(own_copies(captured.inputs))  # timed calls, which may write, get the program's
        self.draws = self._accepted(plain_draws(self.inputs, draws, seed, in_a_row=self.in_a_row))
        self.all_range_draws = range_draws(self.inputs, in_a_row=self.in_a_row)

    def _accepted(self, draws: Sequence[Draw]) -> list[Draw]:
        """The draws that the original can be called with: offsets or indices may not be drawn at random."""
        kept = [draws[0]]
        for draw in draws[1:]:
            try:
                self.steps(self.eager(FP32), draw)
            except Exception as error:
                why = textwrap.shorten(str(error) or type(error).__name__, 120, placeholder=" …")
                self.note = f"a random input was not verified on, because the model refuses it: {why}"
            else:
                kept.append(draw)
        return kept

    def own_error(self, lane: Lane) -> float:
        """Eager's largest error in the lane, over outputs and draws, as it is told: see `followed`."""
        if lane not in self._told_errors:
            told = [
                self._told(self.own_errors(lane, each), functools.partial(self.following.eager, lane, each))
                for each in self.draws
            ]
            self._told_errors[lane] = max(told, default=0.0)
        return self._told_errors[lane]

    def _told(self, errors: Sequence[float], followed: Callable[[], Followed | None]) -> float:
        """The largest of the original's own errors, or that against the original with the same choices."""
        worst = max(errors, default=0.0)
        found = followed() if self.follows and worst > FOLLOWED_FROM else None
        return worst if found is None else min(worst, found.error)

    @property
    def follows(self) -> bool:
        """Whether the choices of others count as right: a user's tolerance is about the original's."""
        return self.tolerance is None

    @functools.cached_property
    def following(self) -> Following:
        """The original that makes the choices of others."""
        return Following(self, self.draws, self.errors_against)

    @property
    def is_sound(self) -> bool:
        """Whether the original gives numbers in FP32: what holds for a diverged one holds for no other."""
        try:
            return math.isfinite(self.own_error(FP32))
        except Exception as error:  # it fails in FP32, which a note on the lane says
            check_interrupted(error)
            return False

    @functools.cached_property
    def called_error(self) -> float | None:
        """The original's error as the process calls it, with its setting of TF32; None without TF32."""
        if not rounds_to_tf32(self.device):
            return None
        followed = functools.partial(self.following.followed, self.as_called)
        told = [
            self._told(self._called_errors(draw), functools.partial(followed, draw)) for draw in self.draws
        ]
        return max(told, default=0.0)

    def _called_errors(self, draw: Draw) -> list[float]:
        if draw.name not in self._called:
            self._called[draw.name] = self.errors(self.as_called, draw)
        return self._called[draw.name]

    def own_errors(self, lane: Lane, draw: Draw) -> list[float]:
        """Eager's relative error of each output on a draw, in the lane."""
        if (lane, draw.name) not in self._own:
            self._own[lane, draw.name] = self.errors(self.eager(lane), draw)
        return self._own[lane, draw.name]

    def errors(self, run: Run, draw: Draw) -> list[float]:
        """The relative error of each output on a draw, the largest over its calls."""
        return self.errors_against(self.steps(run, draw), self.reference(draw), draw)

    def errors_against(
        self, found: Sequence[Sequence[Tensor]], reference: Sequence[Sequence[Tensor]], draw: Draw
    ) -> list[float]:
        """The relative error of each output of a draw's calls against others, the largest over the calls."""
        usual = self._usual_norms
        norms = [LEAST_NORM * norm if draw not in self.draws else 0.0 for norm in usual]
        worst = [0.0] * len(usual)
        for outputs, expected in zip(found, reference, strict=True):
            if len(outputs) != len(expected):
                return [float("inf")] * max(len(expected), 1)
            for index, (a, b, norm) in enumerate(zip(outputs, expected, norms, strict=True)):
                error = relative_error(a, b, least_norm=norm)
                worst[index] = max(worst[index], error if error == error else math.inf)
        return worst

    def range_draws(self, lane: Lane) -> Iterator[Draw]:
        """The draws outside of the examples' range on which eager, in the lane, does not fail."""
        for draw in self.all_range_draws:
            try:
                self.own_errors(lane, draw)
            except Exception:  # the model does not take such inputs
                continue
            yield draw

    @functools.cached_property
    def _usual_norms(self) -> list[float]:
        """The norm of each output's finite elements on the examples."""
        return [finite_norm(tensor) for tensor in self.reference(self.draws[0])[0]]

    def counts(self, lane: Lane, draw: Draw, output: int, error: float) -> bool:
        """Whether an error on a draw affects the verdict.

        Outside of the examples' range it does not if eager overflows in the lane. If eager is too inexact to
        be a reference, a program has to be finite, and does not where the original as it is called is not. A
        result that cancels, to a small share of the usual one, may be decided by rounding.
        """
        own, most = self.own_errors(lane, draw)[output], lane.limits.largest
        if draw in self.draws:
            return True
        if not math.isfinite(error):
            return math.isfinite(own) and math.isfinite(self._called_errors(draw)[output])
        if own > most or error <= most:
            return own <= most
        usual = self._usual_norms[output]
        norm = max(LEAST_NORM * usual, *(finite_norm(each[output]) for each in self.reference(draw)))
        is_small = error * norm < CANCELLED * usual
        enough = max(most, error / lane.limits.multiple)
        jump = self.largest_jump(lane, draw, output, enough, within=True) if is_small else 0.0
        return jump <= most or error > lane.limits.allowed(jump)

    def largest_jump(
        self, lane: Lane, draw: Draw, output: int, enough: float = math.inf, *, within: bool = False
    ) -> float:
        """How far rounding alone changes eager's output on a draw; see the class. Overflow is no change.

        `enough`: what need not be exceeded. `within`: the rounding of all that eager computes, too, as
        another order of every sum changes it. Far outside of the examples' range that can be 100 times as
        much: a model may amplify it there.
        """
        none = [0.0] * len(self.reference(draw)[0])
        done, worst = self._jumps.get((lane, draw.name, within), (0, none))
        if done < ROUNDINGS and worst[output] < enough:
            seeds, roundings = range(done, ROUNDINGS), roundings_of_sums(lane.dtype) if within else 0.0
            for moved in self.runs_rounded_anew(lane, seeds, within=True, roundings=roundings):
                with contextlib.suppress(Exception):  # PyTorch's own: what it refuses tells nothing
                    errors = [e if math.isfinite(e) else 0.0 for e in self.errors(moved, draw)]
                    worst = [max(pair) for pair in zip(worst, errors, strict=True)]
                done += 1
                if worst[output] >= enough:
                    break
            self._jumps[lane, draw.name, within] = done, worst
        return worst[output]

    def yardstick(self, lane: Lane, draw: Draw, output: int) -> float | None:
        """The error in the place of eager's own on a draw where eager is no yardstick; None where it is.

        It is none in a mixed lane in which its usual error is over the lane's largest limit, or infinite. In
        its place comes the error of eager in FP32 whose weights, inputs and results are all rounded anew to
        the lane's dtype, as if this had FP32's range; it allows `Limits.without_eager` at the most. Where the
        process lets the original round to TF32, which has as few bits, it is at least the error that the
        original has to its caller; one over the largest limit licenses nothing.
        """
        limits = lane.limits
        own = statistics.median_low([self.own_errors(lane, each)[output] for each in self.draws])
        if not lane.is_mixed or own <= limits.largest:
            return None
        most = limits.without_eager / limits.multiple
        if (lane, draw.name) not in self._unlimited:
            found = [math.inf] * len(self.reference(draw)[0])
            for moved in self.runs_rounded_anew(lane, range(1), within=True, unlimited=True):
                with contextlib.suppress(Exception):  # a composite kernel may not bear to be taken apart
                    found = self.errors(moved, draw)
            self._unlimited[lane, draw.name] = found
        instead = min(self._unlimited[lane, draw.name][output], most)
        called = self._called_errors(draw)[output] if rounds_to_tf32(self.device) else 0.0
        return max(instead, called) if called <= limits.largest else instead

    def limit(self, lane: Lane, draw: Draw, output: int, error: float) -> float:
        """The largest relative error that a program may have on a draw; `error` is its present error."""
        is_usual = draw in self.draws
        if self.tolerance is not None and is_usual:
            return self.tolerance
        if is_usual and (instead := self.yardstick(lane, draw, output)) is not None:
            return min(lane.limits.allowed(instead), lane.limits.largest)
        usual = statistics.median_low(
            [self._usual_error(lane, each, output) for each in self.draws]
        )  # no draw's jump is another's licence
        mine = self.own_errors(lane, draw)[output]
        limit = min(lane.limits.allowed(max(usual, mine if mine < 1.0 else 0.0)), lane.limits.largest)
        limit = max(limit, self.tolerance or 0.0)
        if limit < error < 1.0:
            jump = self.largest_jump(lane, draw, output, error / AS_FAR)
            bounds = min(lane.limits.allowed(jump), lane.limits.largest), AS_FAR * jump
            limit = max(limit, *bounds)
        if limit < error <= lane.limits.largest and not is_usual:
            jump = self.largest_jump(lane, draw, output, error / lane.limits.multiple, within=True)
            limit = max(limit, min(lane.limits.allowed(jump), lane.limits.largest))
        return limit

    def _usual_error(self, lane: Lane, draw: Draw, output: int) -> float:
        instead = self.yardstick(lane, draw, output)
        return self.own_errors(lane, draw)[output] if instead is None else instead
