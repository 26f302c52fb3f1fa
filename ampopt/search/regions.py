"""Optimizes a model that is not one graph: its largest capturable submodules, and the code between them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import AmpoptError, first_line
from ampopt.ir.lane_io import original_call, original_of
from ampopt.ir.lanes import FP32, Lane, lanes_for
from ampopt.ir.model_copy import device_of, untouched_rng, working_copy
from ampopt.ir.settings import Settings
from ampopt.ir.signature import describe, flatten_call, tensors_of
from ampopt.measure.clocks import latency
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.headline import compare_fairly
from ampopt.measure.ledger import LaneSummary, Ledger
from ampopt.measure.sampling import Gain, Measurement
from ampopt.search.between import Between
from ampopt.search.lane_probe import seconds_of_a_call
from ampopt.search.last_comparison import HEADLINE
from ampopt.search.lower_parts import LowerParts
from ampopt.search.optimizer import BRIEFLY_S
from ampopt.search.options import AUTO_TOLERANCE, Options
from ampopt.search.partly_optimized import PartlyOptimizedModule, patched
from ampopt.search.region import Region, find_regions, optimize_region
from ampopt.search.rehearsal import Sandbox
from ampopt.search.trials import Progress
from ampopt.search.whole_check import WholeCheck
from ampopt.system.budget import Budget
from ampopt.system.environment import environment
from ampopt.system.interrupts import interruptible

MOST_REASONS = 8
"""Number of submodules, and of other parts, whose reasons for running as they were are in a report."""

JUDGING = 0.9
"""Share of the time budget after which nothing is tried; the rest is for comparing the whole."""

MOST_BETWEEN = 0.5
"""Largest share of the remaining time for the code between submodules."""

COMPARING_S = 1.0
"""Time in seconds of comparing calls with and without optimized code between the submodules."""


class PartwiseOptimizer:
    """The work of one `optimize` call for a private copy of a model; `reason` says why it is not one graph.

    `original`, a private copy, is not called: copies of it are, so that the result starts with its state.

    The parts are the largest capturable submodules, and then the graphs of the code between them; each gets
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
        leaves = flatten_call(args, kwargs)[0]
        self._device = device_of(original, leaves)
        self._budget, self._end = Budget(started, options.budget_s), started + JUDGING * options.budget_s
        name, inputs = type(original_of(original)).__name__, tuple(map(describe, tensors_of(leaves)))
        self._ledger = Ledger(name, environment(self._device), inputs, notes=[f"not one graph: {reason}"])
        self._asked = options
        self._part_options = options if options.metric is None else _without_metric(options)
        self._options = dataclasses.replace(self._part_options, precision=FP32.name)
        self._check = WholeCheck(original, args, kwargs, self._device, _limit(options), options.metric)
        self._modules: dict[str, OptimizedModule] = {}
        self._between: Between | None = None
        self._lower: LowerParts | None = None

    def run(self) -> PartlyOptimizedModule:
        """Optimize what can be, and decide what is served. Raises InputError if the user's metric fails."""
        with interruptible():
            if self._check.metric is not None:
                self._check.try_metric()
            inside, args, kwargs = original_call(self._original, self._args, self._kwargs)
            regions, call_s = self._find(inside, args, kwargs), 0.0
            if self._budget.left_s > 0:
                call_s = seconds_of_a_call(inside, args, kwargs, self._options.budget_s)
        was_cut_off = self._optimize_submodules(regions, call_s)
        if not was_cut_off and time.perf_counter() < self._end:
            was_cut_off = self._optimize_between()
        if was_cut_off:
            self._ledger.notes.append("interrupted: this is the best so far")
            self._options = self._options.within(BRIEFLY_S)
        if not self._ledger.regions:
            self._ledger.notes.append("no part of it can be captured: the model runs as it was")
        self._compare_or_leave()
        self._ledger.seconds = time.perf_counter() - self._started
        if self._ledger.chosen == ORIGINAL:
            self._modules, self._between = {}, None
        return PartlyOptimizedModule(self._original, self._modules, self._between, self._ledger, self._device)

    def _find(self, inside: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Region]:
        """The submodules to optimize."""
        reasons = list[str]()
        is_over = lambda: self._budget.left_s <= 0  # noqa: E731
        found = list(find_regions(inside, args, kwargs, self._device, reasons, is_over))
        self._note(reasons, "more submodules are no single graph either")
        return found

    def _note(self, reasons: Sequence[str], more: str) -> None:
        self._ledger.notes += reasons[:MOST_REASONS]
        if len(reasons) > MOST_REASONS:
            self._ledger.notes.append(f"{len(reasons) - MOST_REASONS} {more}")

    def _optimize_submodules(self, regions: Sequence[Region], call_s: float) -> bool:
        """Optimize them in FP32, then in lower precision; whether Ctrl-C has ended the work."""
        took = [seconds_of_a_call(r.original, *r.calls[0], self._options.budget_s) for r in regions]
        inside = min(sum(took) / call_s, 1.0) if call_s else 1.0
        now = time.perf_counter()
        seconds = (self._end - now) * max(inside, 1 - MOST_BETWEEN)
        end, lower = now + seconds, LowerParts(self._original, self._check, regions, took, self._part_options)
        lower_s = 0.0
        if seconds > 0:
            try:
                with interruptible():
                    lower.look(call_s, seconds)
                lower_s = lower.weight_s(end - time.perf_counter())
            except KeyboardInterrupt:
                return True
            except Exception as error:
                self._ledger.notes.append(f"lower precision was not tried: {first_line(error)}")
        if self._optimize_in_fp32(regions, took, end, lower_s):
            return True
        return self._optimize_lower(lower, end)

    def _optimize_lower(self, lower: LowerParts, end: float) -> bool:
        """Optimize submodules in lower precision, and keep that where it is right and faster.

        Gives whether Ctrl-C has ended the work.
        """
        was_cut_off = lower.optimize(self._modules, end, self._progress, self._sandbox)
        try:
            lower.settle(0.0 if was_cut_off else self._budget.left_s)
        except KeyboardInterrupt:
            was_cut_off = True
        except Exception as error:
            lower.reasons.append(f"submodules stay in FP32: comparing the whole failed: {first_line(error)}")
        self._lower, self._modules = lower, lower.modules
        self._ledger.regions.update({name: module.report for name, module in self._modules.items()})
        self._note(lower.reasons, "more submodules stay in FP32")
        return was_cut_off

    def _optimize_in_fp32(
        self, regions: Sequence[Region], took: Sequence[float], end: float, lower_s: float
    ) -> bool:
        """Whether Ctrl-C has ended the work.

        Lower precision gets a share of the time until `end`, too, as if it were a submodule of `lower_s`.
        """
        for index, region in enumerate(regions):
            left = end - time.perf_counter()
            if left <= 0 and index > 0:
                self._ledger.notes.append(
                    f"{len(regions) - index} submodules run as they were: the time budget was spent"
                )
                return False
            share = max(left * took[index] / (sum(took[index:]) + lower_s), 0.1)
            options = self._options.within(share)
            try:
                module, was_cut_off = optimize_region(region, options, self._progress, self._sandbox)
            except KeyboardInterrupt:
                return True
            except Exception as error:
                self._ledger.notes.append(f"submodule {region.name} runs as it was: {_reason(error)}")
                continue
            self._ledger.regions[region.name] = module.report
            self._modules[region.name] = module
            if was_cut_off:
                return True
        return False

    def _optimize_between(self) -> bool:
        """Optimize the code between submodules, and keep it if that is faster; whether Ctrl-C ended it."""
        try:
            with interruptible():
                between = Between(self._check.call, patched(self._original, self._modules))
                reports, reasons = dict[str, Ledger](), list[str]()
                for part, report, reason in between.optimize(
                    self._options, self._end - time.perf_counter(), self._progress, self._sandbox
                ):
                    if report is None:
                        reasons.append(f"code from {part.place} on runs as it was: {reason}")
                    else:
                        reports[part.place] = report
                if why := self._why_not_between(between) if reports else "nothing of it was optimized":
                    reasons.append(f"the code between submodules runs as it was: {why}")
                else:
                    self._between = between
                    self._ledger.regions.update(reports)
                self._note(reasons, "more parts of the code run as they were")
        except KeyboardInterrupt:
            return True
        except Exception as error:
            self._ledger.notes.append(f"the code between submodules runs as it was: {first_line(error)}")
        return False

    def _why_not_between(self, between: Between) -> str | None:
        """Why the submodules alone are better; None where the code between them is a gain."""
        without, inside = patched(self._original, self._modules), patched(self._original, self._modules)
        if why_wrong := self._check.judge(between.serve(inside))[1]:
            return why_wrong
        return None if self._gain_between(without, between.serve(inside)).is_real else "it is not faster"

    def _gain_between(self, without: Callable[..., Any], served: Callable[..., Any]) -> Gain:
        return compare_fairly(
            latency(lambda: self._check.call(without), self._device),
            latency(lambda: self._check.call(served), self._device),
            seconds=min(COMPARING_S, max(self._budget.left_s, 0.0)),
        ).gain

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
        model, ledger = patched(self._original, self._modules), self._ledger
        answer: Callable[..., Any] = model if self._between is None else self._between.serve(model)
        error, refused = self._check.judge(answer)
        inside, own_args, own_kwargs = original_call(working_copy(self._original), self._args, self._kwargs)

        def serve() -> object:
            with Settings().scope(self._device):
                return answer(*self._args, **self._kwargs)

        with torch.no_grad(), untouched_rng(self._device):
            found = compare_fairly(
                latency(lambda: inside(*own_args, **own_kwargs), self._device),
                latency(serve, self._device),
                seconds=HEADLINE * self._options.budget_s,
            )
        if not ledger.regions:
            refused = "nothing was optimized"
        ledger.baseline, ledger.gain, ledger.load = found.before, found.gain, found.load
        served = next(iter(self._lower.lanes.values()), FP32) if self._lower is not None else FP32
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
            ledger.notes.append(f"precision={self._asked.precision!r} is answered in FP32")

    def _other_lane(self, served: Lane, before: Measurement) -> list[LaneSummary]:
        """The whole in FP32 where lower precision serves, or the other way round, if both were compared."""
        if self._lower is None or self._lower.compared is None:
            return []
        passes, found = tuple(self._ledger.regions), self._lower.compared
        if served is FP32:
            return [_summary(found.lane, before, found.lower, found.lower_error, passes)]
        return [_summary(FP32, before, found.fp32, found.error, passes)]

    @property
    def _asked_lanes(self) -> tuple[Lane, ...]:
        return lanes_for(self._asked.precision, self._device, self._asked.amp_dtype)


def _summary(
    lane: Lane, before: Measurement, after: Measurement, error: float, passes: tuple[str, ...]
) -> LaneSummary:
    dtype = "mixed" if lane.is_mixed else "float32"
    return LaneSummary(lane.name, dtype, before, None, after, error, passes)


def _without_metric(options: Options) -> Options:
    """The options of a part, where the user's metric is about results of the whole."""
    return dataclasses.replace(options, metric=None, tolerance=None)


def _limit(options: Options) -> float:
    """The largest error of the whole; without a tolerance a metric has to be 0, as everywhere."""
    if options.tolerance is not None:
        return options.tolerance
    return AUTO_TOLERANCE if options.metric is None else 0.0


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, AmpoptError) else first_line(error)
