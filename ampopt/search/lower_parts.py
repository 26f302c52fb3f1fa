"""Optimizes submodules in lower precision too, where the whole model stays within its tolerance with them.

An error inside of a model does not tell what it does to thresholds and sorting behind it, so the whole
decides. It is called first with submodules of the original under autocast: that takes a few calls, and only
what it tolerates gets a search. Then each optimized submodule is tried in the place of its FP32 form, which
is there already and serves wherever the lower one is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import first_line, reason_of
from ampopt.ir.lanes import FP32, Lane, lanes_for
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.ir.settings import Settings
from ampopt.ir.signature import copied, map_tensors
from ampopt.measure.clocks import engine_latency, latency, seconds_once_loaded
from ampopt.measure.headline import compare_to_decide
from ampopt.measure.ledger import Ledger
from ampopt.measure.sampling import Measurement, Sampler
from ampopt.search.lane_probe import LOADING, SLOW_CALL_S
from ampopt.search.options import Options, auto_bound
from ampopt.search.partly_optimized import patched
from ampopt.search.region import MOST_CALLS, Region, optimize_region
from ampopt.search.rehearsal import Sandbox
from ampopt.search.served_part import ServedPart
from ampopt.search.subject import rest_s
from ampopt.search.trials import Progress
from ampopt.search.whole_check import WholeCheck, all_finite
from ampopt.system.budget import CALLS_OF_A_TRIAL, calls_to_verify, finish_of
from ampopt.system.interrupts import check_interrupted, interruptible
from ampopt.system.wording import argument

LOOKING = 0.1
"""Share of the submodules' time for learning which of them the whole tolerates in lower precision."""

LEAST = 0.02
"""Share of a call's time from which on a submodule is worth it."""

COMPARING_S = 1.0
"""Time in seconds of comparing a submodule, or the whole, in lower precision with its FP32 form."""

ENOUGH_S = 8.0
"""Time in seconds that the search for the longest submodule's FP32 form keeps in any case: some passes and
engines take seconds however short a call is."""

LEAST_S = 5.0
"""Time in seconds without which no search for lower precision is begun."""

SPENT = "the time budget was spent"


@dataclasses.dataclass(frozen=True)
class ComparedParts:
    """The whole with FP32 parts, and with parts in `lane`: times of a call, and errors on the example."""

    lane: Lane
    fp32: Measurement
    lower: Measurement
    error: float
    lower_error: float


class LowerParts:
    """The submodules of a model in those lanes of `options` that have a lower precision than FP32.

    `modules` are the optimized submodules that serve, `lanes` names the lane of each that is not in FP32;
    `reasons` says why others are in FP32.
    """

    def __init__(
        self,
        check: WholeCheck,
        model: nn.Module,
        regions: Sequence[Region],
        took: Sequence[float],
        options: Options,
    ) -> None:
        """`model`: whose submodules they are. `took`: the time of each region's first call, in seconds.

        `options` are those of a submodule.
        """
        self._check, self._options = check, options
        self._original, self._device = model, check.device
        self._took = {region.name: seconds for region, seconds in zip(regions, took, strict=True)}
        self._regions = sorted(regions, key=lambda region: -self._took[region.name])
        lanes = lanes_for(options.precision, check.device, options.amp_dtype)
        self._asked = [lane for lane in lanes if lane.is_mixed]
        self._tolerated: dict[Lane, list[Region]] = {}
        self._fp32: dict[str, OptimizedModule] = {}
        self._lower_reports: dict[str, Ledger] = {}
        self._together = set[str]()
        self._spent = SPENT
        self.modules: dict[str, OptimizedModule] = {}
        self.lanes: dict[str, Lane] = {}
        self.reasons: list[str] = []
        self.compared: ComparedParts | None = None
        """The whole in FP32 and lower, as `settle` has compared it; None: it has not."""

    def look(self, call_s: float, seconds: float) -> None:
        """Learn which submodules the whole tolerates in lower precision, of those that take long enough.

        `call_s` is the time of a call of the whole, `seconds` that of optimizing the submodules.
        """
        worth = [region for region in self._regions if self._took[region.name] >= LEAST * call_s]
        for lane in self._asked:
            answering = [r for r in worth if self._is_callable(r, lane, seconds)]
            overflowing = [r for r in answering if self._overflows(r, lane)]
            told = [r for r in answering if r not in overflowing]
            end = time.perf_counter() + LOOKING * seconds  # the first calls of a process load kernels
            found = [*self._accepted([], told, lane, end), *overflowing]
            self._tolerated[lane] = sorted(found, key=lambda region: -self._took[region.name])

    def weight_s(self, seconds: float) -> float:
        """Time of a call of the submodules whose lower forms get as much time as their FP32 forms.

        `seconds` are left for all. 0 where FP32 needs all of them.
        """
        tolerated = {region.name for regions in self._tolerated.values() for region in regions}
        if not tolerated:
            return 0.0
        needed = sum(self._took[name] for name in tolerated)
        calls = seconds / (sum(self._took.values()) + needed)
        longest = max(self._took.values())
        fewest = max(map(_fewest_calls, (longest, *(self._took[name] for name in tolerated))))
        if (lacking := max(fewest, ENOUGH_S / longest) / calls if calls > 0 else 1.0) <= 1.0:
            return needed
        whole = lacking * self._options.budget_s
        unit = 10.0 ** max(math.floor(math.log10(whole)) - 1, 0)
        self._spent = f"{SPENT}: {argument('budget_s', round(unit * math.ceil(whole / unit)))} would do"
        return 0.0

    @property
    def is_empty(self) -> bool:
        """Whether results of the whole tell nothing about precision."""
        return self._check.is_empty

    def lanes_of(self, region: Region) -> list[Lane]:
        """The lanes in which the whole tolerates a submodule."""
        return [lane for lane, tolerated in self._tolerated.items() if region in tolerated]

    def takes(self, region: Region, module: OptimizedModule, lane: Lane) -> bool:
        """Take a submodule that was optimized in a lane and FP32 at once, if the whole is right with it."""
        self._together.add(region.name)
        found = module.report.lanes.get(lane.name)
        if found is not None and module.report.chosen == lane.name and found.answered_by is None:
            whole = patched(self._original, {region.name: module})
            if why := self._why_not_known(module.report, lane) or self._why_wrong(whole):
                self.reasons.append(self._stays(region, lane, why))
                return False
            self.lanes[region.name] = lane
        return True

    def optimize(
        self,
        modules: Mapping[str, OptimizedModule],
        end: float,
        rest_s: float,
        progress: Progress,
        sandbox: Sandbox,
    ) -> bool:
        """Try lower precision until `end`, the longest submodules first; whether Ctrl-C has ended it.

        `modules` are the FP32 forms. What is kept is right at every time; `settle` decides about the whole.
        `rest_s`: the time of a call outside of submodules. Where most of a call is now there, the code
        between them gets most of the time.
        """
        self._fp32, self.modules = dict(modules), dict(modules)
        own_s = sum(self._seconds_now(name) for name in self._took)
        if rest_s > own_s:
            now, share = time.perf_counter(), own_s / (own_s + rest_s)
            end = now + share * (end - now)
            self._spent = (
                f"it could save at most {100 * share:.0f} % of a call, and the time goes to the code between "
                f"submodules: a larger {argument('budget_s')} tries both"
            )
        for lane, tolerated in self._tolerated.items():
            done = self._together | set(self.lanes)
            waiting = [region for region in tolerated if region.name not in done]
            for index, region in enumerate(waiting):
                left, took = end - time.perf_counter(), self._took[region.name]
                share = left * took / sum(self._took[each.name] for each in waiting[index:])
                if share < max(LEAST_S, _fewest_calls(took) * took):
                    self.reasons.append(self._stays(region, lane, self._spent))
                    continue
                if self._try(region, lane, share, progress, sandbox):
                    return True
        return False

    def _seconds_now(self, name: str) -> float:
        """The time of a call of a submodule in FP32, as it serves."""
        if (module := self._fp32.get(name)) is None or module.report.chosen not in module.report.lanes:
            return self._took[name]
        return module.report.lanes[module.report.chosen].best.median

    def settle(self, seconds: float) -> None:
        """Take FP32 for all that were optimized in FP32 first, unless the whole is faster with what was kept.

        Faster is what is so outside the noise.
        """
        kept, lanes, self.modules = self.modules, self.lanes, self._fp32
        self.lanes = {name: lane for name, lane in lanes.items() if name in self._together}
        if len(lanes) > len(self.lanes):
            with interruptible():
                forms = patched(self._original, self._fp32), patched(self._original, kept)
                error, lower_error = (self._check.judge(form)[0] for form in forms)
                before, after = (
                    latency(functools.partial(self._check.call, form), self._device) for form in forms
                )
                found = compare_to_decide(before, after, seconds=min(COMPARING_S, max(seconds, 0.0)))
            lane = next(iter(lanes.values()))
            if not self.lanes:  # else neither form is in FP32
                self.compared = ComparedParts(lane, found.before, found.after, error, lower_error)
            if found.gain.is_real:
                self.modules, self.lanes = kept, lanes
            else:
                names = ", ".join(dict.fromkeys(lane.name for lane in lanes.values()))
                self.reasons.append(f"submodules stay in FP32: the whole is not faster with them in {names}")
        self._tell_both()

    def _is_callable(self, region: Region, lane: Lane, seconds: float) -> bool:
        """Whether a call of the original submodule in a lane gives a result, and within a trial's time."""
        whole = sum(self._took.values())
        share = 0.5 * seconds * self._took[region.name] / whole if whole else 0.0
        most_s = max(SLOW_CALL_S, share / CALLS_OF_A_TRIAL)
        args, kwargs = map_tensors(copied, *region.calls[0])
        call = functools.partial(_Lowered(working_copy(region.original), lane, self._device), *args, **kwargs)
        try:
            with untouched_rng(self._device):
                loading_s = LOADING * self._options.budget_s  # once for all of them
                limits = {"long_s": SLOW_CALL_S, "most_s": most_s, "loading_s": loading_s}
                took = seconds_once_loaded(call, self._device, **limits)
        except Exception as error:
            check_interrupted(error)
            self.reasons.append(self._stays(region, lane, f"it fails ({first_line(error)})"))
            return False
        if took > most_s:
            self.reasons.append(self._stays(region, lane, f"one call takes over {most_s:.2g} s"))
        return took <= most_s

    def _overflows(self, region: Region, lane: Lane) -> bool:
        """Whether autocast tells nothing about a submodule, because its search would have to rescue it."""
        with untouched_rng(self._device), Settings().scope(self._device):
            rows = [map_tensors(copied, *region.calls[0]) for _ in range(2)]
            model = working_copy(region.original)
            lowered = _Lowered(working_copy(region.original), lane, self._device)
            (args, kwargs), (own_args, own_kwargs) = rows
            return all_finite(model(*args, **kwargs)) and not all_finite(lowered(*own_args, **own_kwargs))

    def _accepted(self, base: list[Region], more: list[Region], lane: Lane, end: float) -> list[Region]:
        """`base` and as many more as the whole tolerates under autocast, found by halves, the first first."""
        if not more:
            return base
        if time.perf_counter() > end:
            self.reasons += [self._stays(region, lane, SPENT) for region in more]
            return base
        model = patched(self._original, {})
        for region in (*base, *more):
            module = model.get_submodule(region.name)
            module.forward = _Lowered(module.forward, lane, self._device, _dtype_of(module))
        why = self._why_wrong(model)
        if why is None:
            return [*base, *more]
        if len(more) == 1:
            self.reasons.append(self._stays(more[0], lane, why))
            return base
        half = len(more) // 2
        return self._accepted(self._accepted(base, more[:half], lane, end), more[half:], lane, end)

    def _try(self, region: Region, lane: Lane, share: float, progress: Progress, sandbox: Sandbox) -> bool:
        """Optimize a submodule in a lane, keep it if it is right and faster; whether Ctrl-C ended that."""
        options = dataclasses.replace(self._options.within(share), precision=lane.name)
        fp32, was_cut_off = self._fp32.get(region.name), False
        try:
            rival = _calls_of(region, region.calls[:1], fp32, self._device)
            given = options, progress, sandbox, rival
            module, was_cut_off = optimize_region(region, *given, call_s=self._took[region.name])
            self._lower_reports[region.name] = module.report
            with interruptible():
                seconds = 0.0 if was_cut_off else min(COMPARING_S, LOOKING * share)
                why = self._why_not(region, lane, module, seconds)
        except KeyboardInterrupt:
            return True
        except Exception as error:
            why = reason_of(error)
        if why is None:
            self.modules[region.name], self.lanes[region.name] = module, lane
        else:
            self.reasons.append(self._stays(region, lane, why))
        return was_cut_off

    def _why_not(self, region: Region, lane: Lane, module: OptimizedModule, seconds: float) -> str | None:
        """Why the FP32 form of a submodule is better; None where the lower one is faster, and right."""
        if module.report.chosen != lane.name:
            found = module.report.lanes.get(lane.name)
            reason = found.refused if found is not None else "; ".join(module.report.notes[:1])
            return reason or "it is not faster"
        if why := self._why_not_known(module.report, lane):
            return why
        before, after = (self._sampler(region, form) for form in (self._fp32.get(region.name), module))
        if not compare_to_decide(before, after, seconds=seconds).gain.is_real:
            return "it is not faster"
        return self._why_wrong(patched(self._original, {**self.modules, region.name: module}))

    def _why_not_known(self, report: Ledger, lane: Lane) -> str | None:
        """Why a submodule may not have lower precision, where results of the whole do not tell about it."""
        error, limit = report.lanes[lane.name].error, self._check.limit
        if self._check.is_auto:
            limit = max(limit, auto_bound(report.called_error))
        if not self._check.is_empty or error <= limit:
            return None
        return (
            f"its own error {error:.2g} is over {limit:.2g}, and the model's results, which "
            "could tell what that does, are empty: give an example with something in it"
        )

    def _sampler(self, region: Region, form: OptimizedModule | None) -> Sampler:
        """Samples all calls of a submodule in a call of the whole."""
        call = _calls_of(region, region.calls[:MOST_CALLS], form, self._device)
        return engine_latency(call, self._device, rest_s=0.0 if form is None else rest_s(form.program))

    def _why_wrong(self, model: nn.Module) -> str | None:
        try:
            return self._check.judge(model, lower=True)[1]
        except Exception as error:
            check_interrupted(error)
            return f"the whole model fails ({first_line(error)})"

    def _stays(self, region: Region, lane: Lane, why: str) -> str:
        return f"submodule {region.name} stays in FP32: in {lane.name} {why}"

    def _tell_both(self) -> None:
        """Let the report of each submodule tell what was tried in every lane."""
        for name, lower in self._lower_reports.items():
            if (own := self._fp32.get(name)) is None:
                continue
            lanes, entries = {**own.report.lanes, **lower.lanes}, [*own.report.entries, *lower.entries]
            served = self.modules[name].report
            served.lanes, served.entries = lanes, entries


def _fewest_calls(call_s: float) -> int:
    """Number of calls of a submodule for which its share has to last. Else FP32 keeps the whole time."""
    return calls_to_verify(0) + CALLS_OF_A_TRIAL + finish_of(call_s, is_part=True).calls


class _Lowered:
    """Calls a function under a lane's autocast, and gives its results in `dtype`, as a submodule's are."""

    def __init__(
        self,
        function: Callable[..., Any],
        lane: Lane,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._function, self._lane, self._device, self._dtype = function, lane, device, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's results."""
        with self._lane.scope(self._device):
            return pytree.tree_map(self._back, self._function(*args, **kwargs))

    def _back(self, leaf: Any) -> Any:
        is_lower = isinstance(leaf, Tensor) and leaf.dtype is self._lane.dtype
        return leaf.to(self._dtype) if is_lower else leaf


def _dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of the results of a submodule: that of its weights."""
    floating = (each.dtype for each in module.parameters() if each.is_floating_point())
    return next(floating, FP32.dtype)


def _calls_of(
    region: Region, calls: Sequence[Any], form: OptimizedModule | None, device: torch.device
) -> Callable[[], object]:
    """Calls a form of a submodule, None: the original, for each of these calls, with tensors of its own."""
    answer: Callable[..., Any] = working_copy(region.original)
    if form is not None:
        answer = ServedPart(working_copy(region.original), form)
    own = [map_tensors(copied, *call) for call in calls]

    def call() -> None:
        with Settings().scope(device):
            for args, kwargs in own:
                answer(*args, **kwargs)

    return call
