"""Verification: programs against the original model in float64.

It runs programs on the examples and on fresh draws, and watches whose memory they write and return; with a
fault (NaN, infinity) in one element of the inputs, which must still reach the outputs; and, for programs that
are served or exported, far outside of the examples' range.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ampopt.errors import InputError, first_line
from ampopt.ir.capture import Captured
from ampopt.ir.choices import kept_to_tell
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import same_tensor
from ampopt.ir.numerics import Check
from ampopt.ir.unchecked_reads import divides_towards_zero, why_nan_may_crash
from ampopt.measure.clocks import synchronize
from ampopt.measure.draws import Draw, fault_draws, faults_elsewhere, integer_draws
from ampopt.measure.fault_check import FaultCheck, Faults
from ampopt.measure.followed import FOLLOWED_FROM, Judged
from ampopt.measure.integer_check import IntegerCheck
from ampopt.measure.metric import Metric, metric_value
from ampopt.measure.original import Run
from ampopt.measure.own_errors import OwnErrors
from ampopt.measure.ownership import Watched, Ways
from ampopt.system.interrupts import check_interrupted


class Verifier(OwnErrors):
    """Compares programs with the original model in float64, on the example inputs and on fresh draws.

    The limits are those that the original's own errors allow, see `OwnErrors`; a program that makes other
    choices that are as good is compared with the original that makes these, see `followed`. A model with a
    state is called several times in succession from its initial state, and every output and state of every
    call counts.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        *,
        tolerance: float | None = None,
        metric: Metric | None = None,
        draws: int = 2,
        seed: int = 0,
        faults: Faults = "keep",
    ) -> None:
        """Compute the references. `model`, a private copy on the program's device, is not called itself."""
        self.metric, self.faults = metric, faults
        self._ways: dict[Lane, Ways] = {}
        super().__init__(model, captured, tolerance=tolerance, draws=draws, seed=seed)
        most = math.inf if metric is not None else tolerance or 0.0  # a metric alone knows what is right
        self.fault_check = FaultCheck(self, faults, most)
        in_a_row, inputs = self.in_a_row, self.inputs
        smallest = not divides_towards_zero(captured.program)
        self._integer_draws = integer_draws(inputs, in_a_row=in_a_row, with_smallest=smallest)
        crash = why_nan_may_crash(captured.program)
        self._fault_draws = [] if crash else fault_draws(inputs, in_a_row=in_a_row)
        self._faults_elsewhere = [] if crash else faults_elsewhere(inputs, in_a_row=in_a_row)
        if crash is not None and faults != "ignore":
            self.note = "; ".join(filter(None, (self.note, f"what becomes of NaN is not verified: {crash}")))
        if metric is not None:
            self._try_metric()

    @property
    def follows(self) -> bool:
        """As `OwnErrors.follows`; a user's metric is about the original's choices, too."""
        return super().follows and self.metric is None

    def _try_metric(self) -> None:
        """Raise InputError where the user's metric cannot compare the original's own outputs."""
        run = self.eager(FP32)
        try:
            self.check_metric(run)
        except Exception as error:
            raise InputError(
                f"metric={self.metric!r} fails on the original's own outputs: {first_line(error)}. It gets "
                "the outputs and those of the original in float64, and returns a number"
            ) from error

    def settling_s(self, call_s: float) -> float:
        """Seconds to verify a first program outside of the examples' range, as far as known.

        The references, eager, whose calls take `call_s`, and the program run on each draw; where a program
        may choose otherwise, both of them and a reference of each once more outside of the range.
        """
        far, elsewhere = self.all_range_draws, self._faults_elsewhere
        often = 3 if self.follows and self.following.applies else 1
        runs = [(often, draw) for draw in far] + [(1, draw) for draw in elsewhere]
        return sum(n * self.exact_s + min(n, 2) * 2 * call_s * len(draw.calls) for n, draw in runs)

    def check(self, run: Run, lane: Lane, *, everywhere: bool = False, static: bool = False) -> Check:
        """Verify a function of flat tensors as a program of the lane.

        `everywhere`: also on the draws outside of the examples' range, with faults in other places, and with
        other integers; the reported error is that inside the range. `static`: results may stay in memory of
        the program's own. Every call is watched for what it does with its caller's memory. What the program
        raises is raised; with `everywhere` it is wrong, as the original answers on each of these draws.
        """
        watched = Watched(run, static=static)
        try:
            with kept_to_tell():
                found = self._check_values(watched, lane, everywhere=everywhere)
        except Exception as error:
            is_own, watched.error = error is watched.error, None  # a cycle would keep its tensors
            if not everywhere or not is_own:
                raise
            check_interrupted(error)
            synchronize(self.device)  # raises where the device is left unusable, which is more than wrong
            reason = f"it raises an error where the original answers: {first_line(error)}"
            return Check(math.inf, lane.limits.largest, reason)
        if found.passed and (other := self._why_other_ways(watched, lane)) is not None:
            return Check(found.error, found.limit, other)
        return found

    def _check_values(self, run: Run, lane: Lane, *, everywhere: bool) -> Check:
        """The part of `check` that is about results: errors, other integers, and faults."""
        worst = self.check_errors(run, lane, everywhere=everywhere)
        if worst.passed and everywhere:
            worst = self.check_integers(run, lane, worst)
        if not worst.passed or self.faults == "ignore":
            return worst
        draws = [*self._fault_draws, *(self._faults_elsewhere if everywhere else ())]
        return self.fault_check.check(run, lane, worst, draws)

    def check_errors(self, run: Run, lane: Lane, *, everywhere: bool = False) -> Check:
        """The part of `check` that is about errors, without what becomes of faults."""
        draws = [*self.draws, *(self.range_draws(lane) if everywhere else ())]
        worst = Check(0.0, float("inf"), None)
        if self.metric is not None:
            return self.check_metric(run)
        for draw in draws:
            if not (check := self._check_draw(run, lane, draw)).passed:
                return check
            if draw in self.draws:
                note = worst.note or check.note
                worst = max(worst, check, key=lambda found: found.error)
                worst = dataclasses.replace(worst, note=note)
        return worst

    def _check_draw(self, run: Run, lane: Lane, draw: Draw) -> Check:
        worst = Check(0.0, float("inf"), None)
        judged = self.judged(run, lane, draw)
        for output, error, limit in judged.found:
            if not error <= limit or not math.isfinite(error):
                is_usual, own = draw in self.draws, self.own_errors(lane, draw)[output]
                own, place = (self.own_error(lane), "") if is_usual else (own, f" with {draw.name}")
                told = f"error {error:.2g} is over {limit:.2g} (eager's own: {own:.2g})"
                return Check(error, limit, f"output {output}{place}: {told}")
            if error >= worst.error:
                worst = Check(error, limit, None)
        error = max(worst.error, judged.chosen)
        return dataclasses.replace(worst, error=error, note=judged.note)

    def judged(self, run: Run, lane: Lane, draw: Draw) -> Judged:
        """The outputs that count on a draw, each with its error and the largest that it may have.

        Where they are far off, they are compared with the original that makes the run's own choices, too, if
        that may be: see `follows`. In FP32 the very bits of the original are right, whatever float64 gives.
        """
        outputs, followed = self.steps(run, draw), None
        errors = self.errors_against(outputs, self.reference(draw), draw)
        is_far = max(errors, default=0.0) > FOLLOWED_FROM
        if self.follows and is_far:
            followed = self.following.judged(run, lane, draw)
            if followed is not None and followed.passed:
                return followed  # what limits plain errors takes up to six runs of eager
        counting = [pair for pair in enumerate(errors) if self.counts(lane, draw, *pair)]
        found = [(output, error, self.limit(lane, draw, output, error)) for output, error in counting]
        plain = Judged(found)
        if plain.passed or not self.follows:
            return plain
        if not lane.is_mixed and self._are_eagers(outputs, lane, draw):
            own = [(output, error, max(error, limit)) for output, error, limit in found]
            note = f"the results are the original's bit for bit, whose own error in FP32 is {plain.error:.2g}"
            return Judged(own, note)
        if not is_far:
            followed = self.following.judged(run, lane, draw)
        return followed or plain

    def _are_eagers(self, outputs: Sequence[Sequence[Tensor]], lane: Lane, draw: Draw) -> bool:
        """Whether a run's outputs are eager's bit for bit: a chaotic network makes others of any rounding."""
        eager = self.steps(self.eager(lane), draw)
        pairs = zip(itertools.chain(*outputs), itertools.chain(*eager), strict=True)
        return [len(each) for each in outputs] == [len(each) for each in eager] and all(
            same_tensor(mine, its) for mine, its in pairs
        )

    def output_errors(self, run: Run, lane: Lane, draw: Draw) -> list[tuple[float, float]]:
        """The error of each output on a draw, and eager's own in the lane, as they are told: see `judged`."""
        errors, own = self.errors(run, draw), self.own_errors(lane, draw)
        with kept_to_tell():
            if self.judged(run, lane, draw).is_followed:
                followed, eager = self.following.followed(run, draw), self.following.own(lane, draw)
                if followed is not None and eager is not None:
                    errors, own = followed.errors, eager.errors
        return list(zip(errors, own, strict=True))

    def check_metric(self, run: Run) -> Check:
        """Verify with the user's metric alone. Raises InputError where it gives a number below 0."""
        assert self.metric is not None
        limit = self.tolerance if self.tolerance is not None else 0.0
        restore, worst = self.captured.layout.restore, 0.0
        for draw in self.draws:
            for outputs, reference in zip(self.steps(run, draw), self.reference(draw), strict=True):
                pairs = zip(outputs, reference, strict=True)
                if any(bool((torch.isfinite(r) & ~torch.isfinite(o)).any()) for o, r in pairs):
                    return Check(float("inf"), limit, "NaN or Inf where the original has none")
                count = len(reference) - len(self.captured.state)
                mine, its = ([t.clone() for t in tensors[:count]] for tensors in (outputs, reference))
                value = metric_value(self.metric, restore(mine), restore(its))  # it may write into them
                if math.isnan(value):
                    return Check(math.inf, limit, "the metric gives NaN")
                worst = max(worst, value)
        reason = None if worst <= limit else f"the metric gives {worst:.3g}, over the tolerance {limit:.3g}"
        return Check(worst, limit, reason)

    def _why_other_ways(self, watched: Watched, lane: Lane) -> str | None:
        """What a run does with its caller's memory, or its results', that the original itself does not do."""
        if watched.reason is None and not watched.joined:
            return None
        own = self._own_ways(lane)
        if watched.reason is not None and watched.reason != own.reason:
            return watched.reason
        joined = watched.joined - own.joined
        if joined and lane.is_mixed:  # a cast makes a tensor of its own where FP32 has one tensor twice
            joined -= self._own_ways(FP32).joined
        results = len(self.reference(self.draws[0])[0]) - len(self.captured.state)
        pairs = sorted(pair for pair in joined if max(pair) < results)
        return (
            "outputs {} and {} share memory, and the original's do not".format(*pairs[0]) if pairs else None
        )

    def _own_ways(self, lane: Lane) -> Ways:
        """What the original itself does with its caller's memory, and with that of its results."""
        if lane not in self._ways:
            watched = Watched(self.eager(lane))
            for draw in self.draws:
                self.steps(watched, draw)
            self._ways[lane] = watched.ways
        return self._ways[lane]

    def lost_fault(self, run: Run, lane: Lane) -> str | None:
        """Why NaN or infinity of an input is lost; None if it is not lost, or if `faults` is "ignore"."""
        draws = self._fault_draws if self.faults != "ignore" else ()
        return self.fault_check.check(run, lane, Check(0.0, math.inf, None), draws).reason

    def check_integers(self, run: Run, lane: Lane, check: Check) -> Check:
        """The check with what becomes of integers that the examples do not have, see `IntegerCheck`.

        On a GPU an index out of range would end the CUDA context, so there it is not tried.
        """
        if self.device.type != "cpu" or self.metric is not None:
            return check
        return IntegerCheck(self._integer_draws, self.own_errors, self.steps, self._check_draw).check(
            run, lane, check
        )
