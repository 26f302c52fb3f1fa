"""Optimizes a model that is not one graph: its largest capturable submodules, and the code between them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import first_line
from ampopt.ir.lane_io import original_call, original_of
from ampopt.ir.lanes import FP32, Lane, lanes_for
from ampopt.ir.model_copy import device_of, untouched_rng, working_copy
from ampopt.ir.settings import Settings
from ampopt.ir.signature import describe, flatten_call, tensors_of
from ampopt.measure.clocks import latency
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.headline import LEAST, Compared, compare_fairly, compare_to_decide
from ampopt.measure.ledger import LaneSummary, Ledger
from ampopt.measure.sampling import Measurement, Sampler
from ampopt.search.between import Between
from ampopt.search.forms import AS_GRAPHS, form_of
from ampopt.search.lane_probe import seconds_of_a_call
from ampopt.search.last_comparison import HEADLINE
from ampopt.search.optimizer import BRIEFLY_S
from ampopt.search.options import Options, why_more
from ampopt.search.partly_optimized import PartlyOptimizedModule, patched
from ampopt.search.parts_search import PartsSearch, shortened
from ampopt.search.region import Region
from ampopt.search.rehearsal import Sandbox
from ampopt.search.trials import Progress
from ampopt.search.whole_check import WholeCheck
from ampopt.system.budget import COSTLY_CALL_S, WHOLE, Budget
from ampopt.system.environment import environment
from ampopt.system.interrupts import interruptible
from ampopt.system.wording import argument

THREADS_OF_THEIR_OWN = ("onnx-runtime", "openvino")
"""Engines that compute on a CPU in other threads than PyTorch's operators."""

FIRST_SHARE = 0.75
"""Share of the time for submodules on a CPU in which they may have such engines."""

CONTENDED, UNCONTENDED_S = 1.25, 1.0  # threads wait for 18 ms after an operator
"""How many times longer than expected a call may take before parts are tried without such engines, and from
which duration in seconds on it does not take longer for their threads."""

JUDGING = 0.9
"""Share of the time budget after which nothing is tried; the rest is for comparing the whole."""

MOST_BETWEEN = 0.5
"""Largest share of the remaining time for the code between submodules, unless these take little of a call."""

LITTLE, LITTLE_TIME = 0.05, 0.15
"""Share of a call up to which submodules take little of it, and the share of the time that they get then.

What lower precision, or an engine with threads of its own, brings them is not seen in the whole.
"""

TRACING = 1.5
"""How many times as long as the attempt to capture the whole TorchDynamo may take, in three calls."""

COMPARING_S, UNDECIDED_S = 1.0, 2.5
"""Time in seconds of comparing calls of two forms of the model, and then where it is not decided.

A second has six calls of a detector of 60 ms with each."""


class PartwiseOptimizer:
    """The work of one `optimize` call for a private copy of a model; `reason`, its first note, says why.

    `original`, a private copy, is not called: copies of it are, so that the result starts with its state.

    Loops that have a batched form get it first, see `ampopt.batched`, where that is right and faster. The
    parts are the largest capturable submodules, and then the graphs of the code between them; each gets
    the time that is its share of a call. They are optimized in FP32, and submodules then in the other lanes
    that were asked for, too, see `LowerParts`. The whole model is compared with the original; if it differs
    by more than the tolerance, or is not faster, the original is served.
    """

    def __init__(
        self,
        original: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        reason: str,
        *,
        started: float,
        progress: Progress,
        sandbox: Sandbox,
    ) -> None:
        self._original, self._args, self._kwargs = original, args, kwargs
        self._started, self._progress, self._sandbox = started, progress, sandbox
        self._capture_s = time.perf_counter() - started
        leaves = flatten_call(args, kwargs)[0]
        self._device = device_of(original, leaves)
        self._budget, self._end = Budget(started, options.budget_s), started + JUDGING * options.budget_s
        name, inputs = type(original_of(original)).__name__, tuple(map(describe, tensors_of(leaves)))
        self._ledger = Ledger(name, environment(self._device), inputs, notes=[reason])
        self._asked = options
        self._part_options = options.of_parts()
        self._options = dataclasses.replace(self._part_options, precision=FP32.name)
        self._parts: PartsSearch | None = None
        is_auto = options.tolerance is None and options.metric is None
        self._check = WholeCheck(
            original, args, kwargs, self._device, options.limit_of_whole, options.metric, is_auto=is_auto
        )
        self._form = original
        self._with_loops: nn.Module | None = None
        self._loops = ""
        self._modules: dict[str, OptimizedModule] = {}
        self._between: Between | None = None
        self._comparing_s = min(COMPARING_S + UNDECIDED_S, (1 - JUDGING) * options.budget_s)
        """The longest that comparing calls of two forms has taken, or may take."""

    def run(self) -> PartlyOptimizedModule:
        """Optimize what can be, and decide what is served. Raises InputError if the user's metric fails."""
        with interruptible():
            if self._check.metric is not None:
                self._check.try_metric()
            found, call_s = form_of(self._check, self._compared, lambda: self._budget.left_s <= 0), 0.0
            self._form, self._with_loops, self._loops = found.model, found.with_loops, found.loops
            self._ledger.notes += found.notes
            inside, args, kwargs = original_call(self._form, self._args, self._kwargs)
            if self._budget.left_s > 0:
                call_s = seconds_of_a_call(inside, args, kwargs, self._options.budget_s)
                self._end = min(self._end, self._started + self._options.budget_s - WHOLE.calls * call_s)
        was_cut_off = self._optimize_submodules(found.regions, call_s)
        if not was_cut_off and time.perf_counter() + TRACING * self._capture_s < self._end_between:
            was_cut_off = self._optimize_between()
        elif not was_cut_off:
            self._ledger.notes.append(
                "the code between submodules runs as it was: there was no time to trace it"
            )
        if was_cut_off:
            self._ledger.notes.append("interrupted: this is the best so far")
            self._options = self._options.within(BRIEFLY_S)
        if not self._ledger.regions and self._form is self._original:
            self._ledger.notes.append("no part of it can be captured: the model runs as it was")
        self._compare_or_leave()
        self._ledger.seconds = time.perf_counter() - self._started
        if self._ledger.chosen == ORIGINAL:
            self._modules, self._between, self._form = {}, None, self._original
        example = tensors_of(flatten_call(self._args, self._kwargs)[0])
        return PartlyOptimizedModule(
            self._form, self._modules, self._between, self._ledger, self._device, example=example
        )

    def _optimize_submodules(self, regions: Sequence[Region], call_s: float) -> bool:
        """Optimize them in FP32, then in lower precision; whether Ctrl-C has ended the work.

        An engine with threads of its own may be the fastest for a part alone and slow beside PyTorch's code,
        whose threads spin on the same cores. Where that shows in the whole, they are optimized without such
        engines, too, and what makes the whole faster is kept. Where they take little of a call they are so
        from the start, and in FP32.
        """
        took = [seconds_of_a_call(r.original, *r.calls[0], self._options.budget_s) for r in regions]
        inside = min(sum(took) / call_s, 1.0) if call_s else 1.0
        now = time.perf_counter()
        has_second = bool(regions) and self._device.type == "cpu" and self._may_have_threads_of_their_own()
        has_second = has_second and call_s < UNCONTENDED_S
        first, least = self._part_options, 1 - MOST_BETWEEN
        if inside < LITTLE:
            first, least = self._modest(has_second), LITTLE_TIME
            has_second = False
        seconds = (self._end - now) * max(inside, least)

        def search(options: Options, share: float) -> tuple[PartsSearch, bool]:
            own = self._check, self._form, regions, took, call_s, options
            parts = PartsSearch(*own, progress=self._progress, sandbox=self._sandbox)
            left_s = share * (now + seconds - time.perf_counter())
            return parts, parts.run(left_s, self._budget.left_s)

        parts, was_cut_off = search(first, FIRST_SHARE if has_second else 1.0)
        self._adopt(parts)
        if was_cut_off or not has_second or now + seconds < time.perf_counter():
            return was_cut_off
        try:
            if self._is_slower_than_its_parts(took):
                others, was_cut_off = search(self._part_options.without(THREADS_OF_THEIR_OWN), 1.0)
                self._adopt_if_faster(others)
        except KeyboardInterrupt:
            return True
        except Exception as error:
            self._ledger.notes.append(f"parts without engines were not tried: {first_line(error)}")
        return was_cut_off

    def _modest(self, may_contend: bool) -> Options:
        """The options of submodules that take little of a call."""
        options = self._part_options.without(THREADS_OF_THEIR_OWN if may_contend else ())
        return dataclasses.replace(options, precision=FP32.name) if options.precision == "auto" else options

    def _may_have_threads_of_their_own(self) -> bool:
        names = {engine.name for engine in self._part_options.pipeline().engines}
        return not names.isdisjoint(THREADS_OF_THEIR_OWN)

    def _adopt(self, parts: PartsSearch) -> None:
        """Let these parts be the ones that serve, and the ledger tell of them."""
        for told in self._parts.notes if self._parts is not None else ():
            self._ledger.notes.remove(told)
        self._parts, self._modules = parts, parts.modules
        self._ledger.regions = dict(parts.reports)
        self._ledger.notes += parts.notes

    def _is_slower_than_its_parts(self, took: Sequence[float]) -> bool:
        """Whether the whole takes longer than the times of parts with such engines, each alone, promise.

        It does where it is no faster than the original, whose own time may be mostly that of page faults.
        """
        assert self._parts is not None
        chosen = {name: r.lanes[r.chosen] for name, r in self._parts.reports.items() if r.chosen in r.lanes}
        if not any({*lane.passes} & {*THREADS_OF_THEIR_OWN} for lane in chosen.values()):
            return False
        with interruptible():
            found = self._compared(patched(self._form, {}), patched(self._form, self._modules))
        parts_s = sum(lane.best.median for lane in chosen.values())
        expected = max(found.before.median - sum(took), 0.0) + parts_s
        return not found.gain.is_real or found.after.median > CONTENDED * expected

    def _adopt_if_faster(self, others: PartsSearch) -> None:
        """Take parts without such engines where the whole is right and faster; the ledger says so."""
        own, other = (patched(self._form, m) for m in (self._modules, others.modules))
        with interruptible():
            why_wrong = self._check.judge(other, lower=bool(others.lower.lanes))[1]
            found = None if why_wrong else self._compared(own, other)
        if found is not None and found.gain.is_real:
            self._adopt(others)
            engines = " and ".join(THREADS_OF_THEIR_OWN)
            self._ledger.notes.append(
                f"parts are without {engines}, whose threads get into each other's way with PyTorch's: the "
                f"whole is {found.gain.ratio:.2f}x faster"
            )

    def _compared(self, before: Callable[..., Any], after: Callable[..., Any]) -> Compared:
        """Compare calls of two models; for longer where that does not tell which is faster, see `_looked`."""
        began = time.perf_counter()
        found = self._looked(self._sampler(before), self._sampler(after), (COMPARING_S, UNDECIDED_S))
        took, rounds = time.perf_counter() - began, 1 + len(found.before.samples)
        self._comparing_s = max(self._comparing_s, took * max(1.0, (1 + LEAST) / rounds))
        return found

    def _sampler(self, model: Callable[..., Any]) -> Sampler:
        return latency(lambda: self._check.call(model), self._device)

    def _looked(self, before: Sampler, after: Sampler, looks: Sequence[float]) -> Compared:
        """Compare, and again while that is vague and there is time, also for more rounds of costly calls."""
        first, *more = looks
        found = compare_to_decide(before, after, seconds=min(first, self._budget.rest_s))
        for seconds in more:
            is_short = found.before.median >= COSTLY_CALL_S and seconds < 6 * LEAST * found.before.median
            if found.gain.is_told or is_short or self._budget.rest_s < seconds + self._comparing_s:
                break
            found = compare_to_decide(before, after, seconds=seconds)
        return found

    @property
    def _end_between(self) -> float:
        """When the code between submodules has to be made: the whole is compared with it, and at last."""
        return min(self._end, self._started + self._options.budget_s - 2 * self._comparing_s)

    def _optimize_between(self) -> bool:
        """Optimize the code between submodules, and keep it if that is faster; whether Ctrl-C ended it.

        Dynamo, like `torch.export`, takes another path through an encoder that makes nested tensors of what
        its padding mask leaves.
        """
        encoders = [each for each in self._original.modules() if isinstance(each, nn.TransformerEncoder)]
        if any(each.use_nested_tensor for each in encoders):
            self._ledger.notes.append(
                "the code between submodules runs as it was: nn.TransformerEncoder may make nested tensors"
            )
            return False
        try:
            with interruptible():
                form = self._form
                if self._with_loops is not None and self._device.type in AS_GRAPHS:
                    form = self._with_loops
                between = Between(self._check.call, patched(form, self._modules))
                reports, reasons = dict[str, Ledger](), list[str]()
                for part, report, reason in between.optimize(
                    self._options, self._end_between - time.perf_counter(), self._progress, self._sandbox
                ):
                    if report is None:
                        reasons.append(f"code from {part.place} on runs as it was: {reason}")
                    else:
                        reports[part.place] = report
                if why := self._why_not_between(between, form) if reports else "nothing of it was optimized":
                    reasons.append(f"the code between submodules runs as it was: {why}")
                else:
                    self._take(between, form)
                    self._ledger.regions.update(reports)
                self._ledger.notes += shortened(reasons, "more parts of the code run as they were")
        except KeyboardInterrupt:
            return True
        except Exception as error:
            self._ledger.notes.append(f"the code between submodules runs as it was: {first_line(error)}")
        return False

    def _take(self, between: Between, form: nn.Module) -> None:
        """Let optimized code between the submodules serve, which is that of a form of the model."""
        if form is not self._form:
            self._ledger.notes.append(f"{self._loops}: batched, with fixed sizes, as graphs")
        self._between, self._form = between, form

    def _why_not_between(self, between: Between, form: nn.Module) -> str | None:
        """Why the submodules alone are better; None where the code between them, in a form, is a gain."""
        without, inside = patched(self._form, self._modules), patched(form, self._modules)
        if why_wrong := self._check.judge(between.serve(inside), lower=bool(self._lower_lanes))[1]:
            return why_wrong
        looks = (COMPARING_S, HEADLINE * self._options.budget_s)  # the most of a call may be at stake
        found = self._looked(self._sampler(without), self._sampler(between.serve(inside)), looks)
        return None if found.gain.is_real else "it is not faster"

    def _compare_or_leave(self) -> None:
        """`_compare`; where it fails or is interrupted, the original is chosen, and a note says why."""
        try:
            with interruptible():
                self._compare()
        except KeyboardInterrupt:
            reason = "the last comparison was interrupted"
        except Exception as error:
            reason = f"the last comparison failed: {first_line(error)}"
        else:
            return
        self._ledger.lanes.clear()
        self._ledger.chosen = ORIGINAL
        self._ledger.notes.append(f"the original runs: {reason}")

    def _compare(self) -> None:
        """Compare and time the whole model; the ledger's choice becomes the lane, or `ORIGINAL`."""
        model, ledger = patched(self._form, self._modules), self._ledger
        answer: Callable[..., Any] = model if self._between is None else self._between.serve(model)
        error, refused = self._check.judge(answer, lower=bool(self._lower_lanes))
        if error > self._check.limit and self._lower_lanes and not refused:
            ledger.notes.append(why_more(self._check.called_errors[0]))
        if self._check.is_empty:
            ledger.notes.append(
                "the model's results are empty for the example and for random inputs: its parts are verified "
                "by their own, and an example with something in it would tell more"
            )
        inside, own_args, own_kwargs = original_call(working_copy(self._original), self._args, self._kwargs)

        around = torch.no_grad if self._between is None else lambda: Settings().scope(self._device)

        def serve() -> object:
            with around():
                return answer(*self._args, **self._kwargs)

        long_s = HEADLINE * self._options.budget_s
        with torch.no_grad(), untouched_rng(self._device):
            before = latency(lambda: inside(*own_args, **own_kwargs), self._device)
            after = latency(serve, self._device)
            found = compare_fairly(before, after, seconds=min(long_s, self._budget.rest_s))
            if not found.gain.is_told and self._budget.rest_s > long_s:
                found = compare_fairly(before, after, seconds=self._budget.rest_s)
        if not ledger.regions and self._form is self._original:
            refused = "nothing was optimized"
        ledger.baseline, ledger.gain, ledger.load = found.before, found.gain, found.load
        served = next(iter(self._lower_lanes.values()), FP32)
        summary = _summary(served, found.before, found.after, error, tuple(ledger.regions))
        own = dataclasses.replace(summary, refused=refused, gain=found.gain)
        summaries = [own, *self._other_lane(served, found.before)]
        ledger.lanes.update(
            {each.lane: each for each in sorted(summaries, key=lambda s: s.lane != FP32.name)}
        )
        ledger.chosen = served.name if found.gain.is_real and not refused else ORIGINAL
        if ledger.chosen == ORIGINAL:
            ledger.notes.append(f"the original runs: {refused or 'it is not faster'}")
        elif served is FP32 and FP32 not in self._asked_lanes:
            ledger.notes.append(f"{argument('precision', self._asked.precision)} is answered in FP32")

    def _other_lane(self, served: Lane, before: Measurement) -> list[LaneSummary]:
        """The whole in FP32 where lower precision serves, or the other way round, if both were compared."""
        if self._parts is None or (found := self._parts.lower.compared) is None:
            return []
        other = FP32, before, found.fp32, found.error
        if served is FP32:
            other = found.lane, before, found.lower, found.lower_error
        return [_summary(*other, tuple(self._ledger.regions))]

    @property
    def _lower_lanes(self) -> Mapping[str, Lane]:
        """The lanes of the submodules that have lower precision."""
        return self._parts.lower.lanes if self._parts is not None else {}

    @property
    def _asked_lanes(self) -> tuple[Lane, ...]:
        return lanes_for(self._asked.precision, self._device, self._asked.amp_dtype)


def _summary(
    lane: Lane, before: Measurement, after: Measurement, error: float, passes: tuple[str, ...]
) -> LaneSummary:
    dtype = "mixed" if lane.is_mixed else "float32"
    return LaneSummary(lane.name, dtype, before, None, after, error, passes)
