"""Verification: programs against the original model in float64.

It runs programs on the examples and on fresh draws; with a fault (NaN, infinity) in one element of the
inputs, which must still reach the outputs; and, for programs that are served or exported, far outside of the
examples' range.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import InputError, first_line
from ampopt.ir.capture import Captured
from ampopt.ir.graph import decides_by_values, where
from ampopt.ir.lane_io import original_of
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import private_copy, untouched_rng, working_copy
from ampopt.ir.numerics import (
    Check,
    ResultsRoundedAnew,
    is_rounded,
    relative_error,
    rounded_anew,
    roundings_of_sums,
    widened,
)
from ampopt.ir.settings import Settings
from ampopt.ir.signature import flatten_outputs
from ampopt.measure.draws import (
    CALLS_IN_A_ROW,
    Draw,
    fault_draws,
    faults_elsewhere,
    integer_draws,
    plain_draws,
    range_draws,
    steps_of,
)
from ampopt.measure.fault_masks import Bools, Masks, joined_elements, lost_elements, not_finite, share

Metric = Callable[[Any, Any], float]
"""A user's distance: (outputs, the original's outputs) -> number; 0 for equal, smaller is better."""

Run = Callable[..., Sequence[Tensor]]
"""Takes and returns flat tensors; a state, if there is one, is last in both."""

Faults = Literal["keep", "exact", "ignore"]
"""How NaN and infinities must propagate.

Elements that are not finite in eager must stay so; others may become so ("keep"), or must not ("exact");
"ignore": not checked.
"""

AS_FAR = 2.0
"""Largest ratio of a program's error to eager's change by rounding, if the error is over the limit.

Outputs of zeros have an error of 1, which never passes.
"""

LEAST_NORM = 1e-6
"""Outside of the examples' range, an output's norm counts as at least this share of that on the examples."""

ROUNDINGS = 6
"""Number of eager runs with changed rounding, to learn how far rounding alone can change an output."""

ROUNDINGS_OF_FAULTS, ROUNDINGS_TO_SEE = 16, 8
"""The same number for NaN, whose position can change at a tie with a probability of a half.

The second: number of runs to see that something else than rounding moves it.
"""


class Verifier:
    """Compares programs with the original model in float64, on the example inputs and on fresh draws.

    The limit for each output is a small multiple of eager's own error in the same lane, and at most
    `Limits.largest`. A model with a discontinuity (the arg-max of a pooling window) can make a large jump
    because of rounding alone, which eager happens not to make. So if a program is over the limit on a draw,
    eager itself runs on that draw with changed rounding of weights and inputs, and the change of its outputs
    counts as eager's own error. A lane in which eager overflows, or is too inexact on most draws, has another
    yardstick, see `yardstick`. A model with a state is called several times in succession from its initial
    state, and every output and state of every call counts. `captured` is the capture of the programs,
    `device` their device.
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
        self.tolerance, self.metric, self.faults = tolerance, metric, faults
        self.note: str | None = None
        self.captured = captured
        self._model = working_copy(model if captured.lifted is None else captured.lifted.model)
        self.device = captured.program.device
        self._exact = self._in_float64()
        self._references: dict[str, list[list[Tensor]]] = {}
        self._own: dict[tuple[Lane, str], list[float]] = {}
        self._unlimited: dict[tuple[Lane, str], list[float]] = {}
        self._jumps: dict[tuple[Lane, str], list[float]] = {}
        self._masks: dict[tuple[Lane, str], Masks | None] = {}
        self._rounded: dict[tuple[Lane, str], tuple[Masks, Iterator[tuple[int, Run]]]] = {}
        in_a_row, inputs = CALLS_IN_A_ROW if captured.lifted else 1, captured.inputs
        self.draws = self._accepted(plain_draws(inputs, draws, seed, in_a_row=in_a_row))
        self._range_draws = range_draws(inputs, in_a_row=in_a_row)
        self._integer_draws = integer_draws(inputs, in_a_row=in_a_row)
        self._fault_draws = fault_draws(inputs, in_a_row=in_a_row)
        self._faults_elsewhere = faults_elsewhere(inputs, in_a_row=in_a_row)
        if metric is not None:
            self._try_metric()

    def _try_metric(self) -> None:
        """Raise InputError where the user's metric cannot compare the original's own outputs."""
        run = self.eager(FP32)
        try:
            self.check_metric(run)
        except Exception as error:
            raise InputError(
                f"metric={self.metric!r} fails on the original's own outputs: {type(error).__name__}: "
                f"{first_line(error)}. It gets the outputs and those of the original in float64, and returns "
                "a number"
            ) from error

    def call_original(self, model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The original's flat outputs for flat input tensors, from a copy; the state is last in both."""
        state, count = self.captured.lifted, len(self.captured.inputs)
        if state is not None:
            state.write(model, [value.clone() for value in tensors[count:]])
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, Tensor) else x for x in self.captured.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.captured.spec)
        with untouched_rng(self.device):
            outputs = flatten_outputs(model(*args, **kwargs))[0]
        return outputs if state is None else [*outputs, *(value.clone() for value in state.read(model))]

    def _accepted(self, draws: Sequence[Draw]) -> list[Draw]:
        """The draws that the original can be called with: offsets or indices may not be drawn at random."""
        kept = [draws[0]]
        for draw in draws[1:]:
            try:
                self._steps(self.eager(FP32), draw)
            except Exception as error:
                reason = textwrap.shorten(str(error) or type(error).__name__, 120, placeholder=" …")
                self.note = (
                    f"a random input was left out of the verification, because the model refuses it: {reason}"
                )
            else:
                kept.append(draw)
        return kept

    def _in_float64(self) -> nn.Module | None:
        """The original in float64; None where it fails there."""
        with Settings().scope(self.device):
            try:
                exact = private_copy(original_of(self._model)).double()
                for tensor in (*exact.parameters(), *exact.buffers()):
                    tensor.data = widened(tensor.data)  # complex ones, too
                self.call_original(exact, _widened(self.captured.program.examples))
            except Exception as error:
                reason = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" …")
                self.note = f"the reference is the model in float32, because it fails in float64: {reason}"
                return None
        return exact

    def reference(self, draw: Draw) -> list[list[Tensor]]:
        """The original's outputs in float64, for each call of a draw."""
        if draw.name not in self._references:
            with Settings().scope(self.device):
                self._references[draw.name] = self._reference(draw)
        return self._references[draw.name]

    def _reference(self, draw: Draw) -> list[list[Tensor]]:
        exact, state = self._exact, self.captured.initial_state
        if exact is None:
            return steps_of(draw, lambda *tensors: self.call_original(self._model, tensors), state)
        wide = Draw(draw.name, tuple(_widened(tensors) for tensors in draw.calls))
        return steps_of(wide, lambda *tensors: self.call_original(exact, tensors), _widened(state))

    def eager(self, lane: Lane, model: nn.Module | None = None) -> Run:
        """The original model as a program of a lane: strict FP32, or under autocast."""

        def run(*tensors: Tensor) -> list[Tensor]:
            with lane.scope(self.device):
                return self.call_original(model or self._model, tensors)

        return run

    def _steps(self, run: Run, draw: Draw) -> list[list[Tensor]]:
        return steps_of(draw, run, self.captured.initial_state)

    def own_error(self, lane: Lane) -> float:
        """Eager's largest relative error in the lane, over outputs and draws."""
        return max((max(self.own_errors(lane, draw), default=0.0) for draw in self.draws), default=0.0)

    def own_errors(self, lane: Lane, draw: Draw) -> list[float]:
        """Eager's relative error of each output on a draw, in the lane."""
        if (lane, draw.name) not in self._own:
            self._own[lane, draw.name] = self.errors(self.eager(lane), draw)
        return self._own[lane, draw.name]

    def errors(self, run: Run, draw: Draw) -> list[float]:
        """The relative error of each output on a draw, the largest over its calls."""
        reference, usual = self.reference(draw), self.reference(self.draws[0])[0]
        norms = [LEAST_NORM * _norm(tensor) if draw not in self.draws else 0.0 for tensor in usual]
        worst = [0.0] * len(usual)
        for outputs, expected in zip(self._steps(run, draw), reference, strict=True):
            if len(outputs) != len(expected):
                return [float("inf")] * max(len(expected), 1)
            for index, (a, b, norm) in enumerate(zip(outputs, expected, norms, strict=True)):
                error = relative_error(a, b, least_norm=norm)
                worst[index] = max(worst[index], error if error == error else math.inf)
        return worst

    def range_draws(self, lane: Lane) -> Iterator[Draw]:
        """The draws outside of the examples' range on which eager, in the lane, does not fail."""
        for draw in self._range_draws:
            try:
                self.own_errors(lane, draw)
            except Exception:  # the model does not take such inputs
                continue
            yield draw

    def counts(self, lane: Lane, draw: Draw, output: int, error: float) -> bool:
        """Whether an error on a draw affects the verdict.

        Outside of the examples' range it does not if eager, in the lane, overflows; if eager is too inexact
        to be a reference, a program only has to be finite.
        """
        own = self.own_errors(lane, draw)[output]
        if draw in self.draws or own <= lane.limits.largest:
            return True
        return math.isfinite(own) and not math.isfinite(error)

    def largest_jumps(self, lane: Lane, draw: Draw) -> list[float]:
        """How far rounding alone changes eager's outputs on a draw; see the class. Overflow is no change."""
        if (lane, draw.name) not in self._jumps:
            worst = [0.0] * len(self.reference(draw)[0])
            for moved in self._rounded_anew(lane, ROUNDINGS):
                with contextlib.suppress(Exception):  # PyTorch's own: what it refuses tells nothing
                    errors = [e if math.isfinite(e) else 0.0 for e in self.errors(moved, draw)]
                    worst = [max(pair) for pair in zip(worst, errors, strict=True)]
            self._jumps[lane, draw.name] = worst
        return self._jumps[lane, draw.name]

    def _rounded_anew(
        self, lane: Lane, times: int, *, within: bool = False, unlimited: bool = False
    ) -> Iterator[Run]:
        """Eager with weights and inputs rounded anew, and `within` all that it computes; so many times.

        `unlimited`: it computes in FP32, so that nothing overflows in the lane's dtype.
        """
        for seed in range(times):
            generator = torch.Generator(self.device).manual_seed(seed)
            model = private_copy(self._model)
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.copy_(rounded_anew(tensor, _lowered(tensor, lane), generator))
            eager = self.eager(FP32 if unlimited else lane, model)

            def moved(
                *tensors: Tensor,
                run: Run = eager,
                seeded: torch.Generator = generator,
                sums: float = roundings_of_sums(lane.dtype, seed),
            ) -> Any:
                inputs = [rounded_anew(tensor, _lowered(tensor, lane), seeded) for tensor in tensors]
                with ResultsRoundedAnew(lane.dtype, seeded, sums) if within else contextlib.nullcontext():
                    return run(*inputs)

            yield moved

    def yardstick(self, lane: Lane, draw: Draw, output: int) -> float | None:
        """The error in the place of eager's own on a draw where eager is no yardstick; None where it is.

        It is none in a mixed lane in which its usual error is over the lane's largest limit, or infinite. In
        its place comes the error of eager in FP32 whose weights, inputs and results are all rounded anew to
        the lane's dtype, as if this had FP32's range; it allows `Limits.without_eager` at the most.
        """
        limits = lane.limits
        own = statistics.median_low([self.own_errors(lane, each)[output] for each in self.draws])
        if not lane.is_mixed or own <= limits.largest:
            return None
        most = limits.without_eager / limits.multiple
        if (lane, draw.name) not in self._unlimited:
            found = [math.inf] * len(self.reference(draw)[0])
            for moved in self._rounded_anew(lane, 1, within=True, unlimited=True):
                with contextlib.suppress(Exception):  # a composite kernel may not bear to be taken apart
                    found = self.errors(moved, draw)
            self._unlimited[lane, draw.name] = found
        return min(self._unlimited[lane, draw.name][output], most)

    def check(self, run: Run, lane: Lane, *, everywhere: bool = False) -> Check:
        """Verify a function of flat tensors as a program of the lane.

        `everywhere`: also on the draws outside of the examples' range, with faults in other places, and with
        other integers; the reported error is that inside the range.
        """
        worst = self.check_errors(run, lane, everywhere=everywhere)
        if worst.passed and everywhere:
            worst = self._check_integers(run, lane, worst)
        if not worst.passed or self.faults == "ignore":
            return worst
        draws = [*self._fault_draws, *(self._faults_elsewhere if everywhere else ())]
        return self._check_faults(run, lane, worst, draws)

    def check_errors(self, run: Run, lane: Lane, *, everywhere: bool = False) -> Check:
        """The part of `check` that is about errors, without what becomes of faults."""
        draws = [*self.draws, *(self.range_draws(lane) if everywhere else ())]
        worst = Check(0.0, float("inf"), None)
        if self.metric is not None:
            return self.check_metric(run)
        for draw in draws:
            check = self._check_draw(run, lane, draw)
            if not check.passed:
                return check
            if draw in self.draws:
                worst = max(worst, check, key=lambda found: found.error)
        return worst

    def _check_draw(self, run: Run, lane: Lane, draw: Draw) -> Check:
        worst = Check(0.0, float("inf"), None)
        for output, error in enumerate(self.errors(run, draw)):
            if not self.counts(lane, draw, output, error):
                continue
            limit = self.limit(lane, draw, output, error)
            if not error <= limit or not math.isfinite(error):
                place = "" if draw in self.draws else f" with {draw.name}"
                text = f"output {output}{place}: error {error:.2g} is over {limit:.2g}"
                own = self.own_error(lane) if draw in self.draws else self.own_errors(lane, draw)[output]
                return Check(error, limit, f"{text} (eager's own: {own:.2g})")
            if error >= worst.error:
                worst = Check(error, limit, None)
        return worst

    def limit(self, lane: Lane, draw: Draw, output: int, error: float) -> float:
        """The largest relative error that a program may have on a draw; `error` is its present error."""
        is_usual = draw in self.draws
        if self.tolerance is not None and is_usual:
            return self.tolerance
        if is_usual and (instead := self.yardstick(lane, draw, output)) is not None:
            return lane.limits.allowed(instead)
        usual = statistics.median_low(
            [self._usual_error(lane, each, output) for each in self.draws]
        )  # no draw's jump is another's licence
        mine = self.own_errors(lane, draw)[output]
        limit = min(lane.limits.allowed(max(usual, mine if mine < 1.0 else 0.0)), lane.limits.largest)
        limit = max(limit, self.tolerance or 0.0)
        if limit < error < 1.0:
            jump = self.largest_jumps(lane, draw)[output]
            bounds = min(lane.limits.allowed(jump), lane.limits.largest), AS_FAR * jump
            limit = max(limit, *bounds)
        return limit

    def _usual_error(self, lane: Lane, draw: Draw, output: int) -> float:
        instead = self.yardstick(lane, draw, output)
        return self.own_errors(lane, draw)[output] if instead is None else instead

    def check_metric(self, run: Run) -> Check:
        """Verify with the user's metric alone."""
        assert self.metric is not None
        limit = self.tolerance if self.tolerance is not None else 0.0
        restore, worst = self.captured.layout.restore, 0.0
        for draw in self.draws:
            for outputs, reference in zip(self._steps(run, draw), self.reference(draw), strict=True):
                pairs = zip(outputs, reference, strict=True)
                if any(bool((torch.isfinite(r) & ~torch.isfinite(o)).any()) for o, r in pairs):
                    return Check(float("inf"), limit, "NaN or Inf where the original has none")
                count = len(reference) - len(self.captured.state)
                mine, its = ([t.clone() for t in tensors[:count]] for tensors in (outputs, reference))
                value = float(self.metric(restore(mine), restore(its)))  # it may write into them
                worst = max(worst, value if value == value else float("inf"))
        reason = None if worst <= limit else f"the metric gives {worst:.3g}, over the tolerance {limit:.3g}"
        return Check(worst, limit, reason)

    def lost_fault(self, run: Run, lane: Lane) -> str | None:
        """Why NaN or infinity of an input is lost; None if it is not lost, or if `faults` is "ignore"."""
        draws = self._fault_draws if self.faults != "ignore" else ()
        return self._check_faults(run, lane, Check(0.0, math.inf, None), draws).reason

    def _check_integers(self, run: Run, lane: Lane, check: Check) -> Check:
        """The check with what becomes of integers that the examples do not have.

        What eager refuses, an index out of range, the program has to refuse. On a GPU that would end the
        CUDA context, so there it is not tried.
        """
        for draw in self._integer_draws if self.device.type == "cpu" and self.metric is None else ():
            try:
                self.own_errors(lane, draw)
            except Exception as refused:
                try:
                    self._steps(run, draw)
                except Exception:
                    continue
                why = textwrap.shorten(str(refused), 120, placeholder=" …")
                reason = f"with {draw.name} in the inputs it answers, and eager does not: {why}"
                return Check(check.error, check.limit, reason)
            try:
                found = self._check_draw(run, lane, draw)
            except Exception as failed:
                why = textwrap.shorten(str(failed), 120, placeholder=" …")
                return Check(check.error, check.limit, f"with {draw.name} in the inputs it fails: {why}")
            if not found.passed:
                return found
        return check

    def _check_faults(self, run: Run, lane: Lane, check: Check, draws: Sequence[Draw]) -> Check:
        """The check with what becomes of NaN and infinities in one element of the inputs."""
        spread = None
        for draw in draws:
            if (masks := self._masks_of(lane, draw)) is None:
                continue
            found = not_finite(self._steps(run, draw))
            masks = self._explained(lane, draw, found, masks)
            for index, lost in enumerate(lost_elements(found, masks.always)):
                if lost:
                    reason = (
                        f"output {index} with {draw.name}: {lost} of the {masks.count(index)} elements that "
                        "are not finite in eager are: a sensor's fault would be lost"
                    )
                    return Check(check.error, check.limit, reason)
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
        if self.faults == "exact":
            return 'nan="exact" forbids'
        if (node := decides_by_values(self.captured.program)) is not None:
            return f"{where(node)} may take for another value and lose a fault"
        return None

    def _masks_of(self, lane: Lane, draw: Draw) -> Masks | None:
        """What is not finite in eager of the lane and in float64; None where the model takes no faults.

        In both: an algorithm of eager's own may spread a fault further.
        """
        if (lane, draw.name) not in self._masks:
            try:
                eager, exact = self._steps(self.eager(lane), draw), self.reference(draw)
                self._masks[lane, draw.name] = Masks.of(not_finite(eager), not_finite(exact))
            except Exception:  # the model does not take such inputs
                self._masks[lane, draw.name] = None
        return self._masks[lane, draw.name]

    def _explained(self, lane: Lane, draw: Draw, found: Bools, masks: Masks) -> Masks:
        """The masks with what rounding alone changes: NaN goes where the largest of a window lies.

        Eager is rounded anew until that explains all of `found`, so many times at the most. What has another
        cause is known sooner: the first times explain less than half of it.
        """
        first = masks.unexplained(found)
        if not first:
            return masks
        rounded, runs = self._rounded.setdefault(
            (lane, draw.name),
            (masks, enumerate(self._rounded_anew(lane, ROUNDINGS_OF_FAULTS, within=True), start=1)),
        )
        while left := rounded.unexplained(found):
            if rounded.roundings >= ROUNDINGS_TO_SEE and 2 * left > first:
                break
            if (after := next(runs, None)) is None:
                break
            times, moved = after
            with contextlib.suppress(Exception):  # a composite kernel may not bear to be taken apart
                rounded = rounded.joined_by(not_finite(self._steps(moved, draw)))
            rounded = dataclasses.replace(rounded, roundings=times)
            self._rounded[lane, draw.name] = rounded, runs
        return rounded


def _widened(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(widened(tensor) for tensor in tensors)


def _lowered(tensor: Tensor, lane: Lane) -> torch.dtype:
    """The dtype that a lane rounds a weight or an input to: complex numbers keep theirs."""
    return tensor.dtype if tensor.is_complex() else lane.dtype


def _norm(tensor: Tensor) -> float:
    if not is_rounded(tensor):
        return 0.0
    return float(torch.linalg.vector_norm(widened(tensor[torch.isfinite(tensor)])))
