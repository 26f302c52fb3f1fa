"""The user's options, checked before any work: precision, limits, and passes to try."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import get_args

import torch

from ampopt.engines.cuda_graphs import Outputs
from ampopt.errors import InputError
from ampopt.ir.arguments import flag, names, number, one_of
from ampopt.ir.casting import POLICIES
from ampopt.ir.lanes import Lane, lanes_for
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.precisions import check_io
from ampopt.ir.size_ranges import Asked
from ampopt.ir.size_ranges import checked as checked_ranges
from ampopt.ir.transform import Pass
from ampopt.measure.fault_check import Faults
from ampopt.measure.metric import Metric
from ampopt.passes import PIPELINE, AllowTf32, BakeAutocast, FuseConvAct, KeepFp32
from ampopt.search.named_passes import Passes, as_pipeline, check_listed, code_of
from ampopt.system.budget import DEFAULT_S, default_budget_s
from ampopt.system.environment import package_versions

AUTO_TOLERANCE = 1e-2
"""Largest relative error of a lane that `precision="auto"` chooses, if the user gives no tolerance."""

AS_CALLED, MOST_AS_CALLED = 2.0, 0.2
"""If the original's own error as it is called is larger: the largest ratio to it, and the largest error.

They are those of a mixed lane to eager's error in it, see `Limits`.
"""


def auto_bound(called: float | None) -> float:
    """The largest error of a lane that `precision="auto"` chooses.

    `called` is the original's error as the process calls it, if that is known to round more than FP32:
    PyTorch's default lets convolutions round to TF32, whose mantissa has as many bits as float16's.
    """
    return max(AUTO_TOLERANCE, min(AS_CALLED * (called or 0.0), MOST_AS_CALLED))


def why_more(called: float) -> str:
    """Why `auto_bound` allows more than `AUTO_TOLERANCE`, for a report."""
    return (
        f"an error of {auto_bound(called):.2g} is allowed: the original's own is {called:.2g} as it is "
        "called, because the process lets it round to TF32"
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """The user's options; see `ampopt.optimize`."""

    precision: str = "auto"
    tolerance: float | None = None
    metric: Metric | None = None
    budget_s: float = DEFAULT_S
    outputs: Outputs = "copy"
    policy: str = "amp"
    amp_dtype: torch.dtype | None = None
    exclude: Collection[str] = ()
    cache: bool = True
    nan: Faults = "keep"
    passes: Passes | None = None
    io: str = "original"
    dynamic: Asked | None = None
    is_budget_given: bool = True

    def __post_init__(self) -> None:
        """Raise InputError, before any work, for an invalid value; convert numbers to Python's types."""
        seconds = number(
            "budget_s", self.budget_s, positive=True, advice="a positive, finite number of seconds"
        )
        checked: dict[str, object] = {"budget_s": seconds}
        known = {step.name for step in PIPELINE}
        if self.tolerance is not None:
            advice = "a relative error, 0 or more and finite"
            checked["tolerance"] = number("tolerance", self.tolerance, positive=False, advice=advice)
        if self.metric is not None and not callable(self.metric):
            raise InputError(
                f"metric={self.metric!r}: give a function, metric(outputs, original_outputs) -> float"
            )
        if not isinstance(self.outputs, str) or self.outputs not in get_args(Outputs):
            raise InputError(f"outputs={self.outputs!r}: choose 'copy' or 'static'")
        one_of("policy", self.policy, POLICIES)
        one_of("nan", self.nan, get_args(Faults))
        checked["dynamic"] = checked_ranges(self.dynamic)
        checked["cache"] = flag("cache", self.cache)
        lanes = lanes_for(self.precision, torch.device("cpu"), self.amp_dtype)
        check_io(self.io, self.precision, len(lanes))
        if self.passes is not None:
            checked["passes"] = pipeline = as_pipeline(self.passes)
            tolerance = math.inf if isinstance(self.passes, Pipeline) else self.tolerance
            check_listed(pipeline, tolerance=tolerance, policy=self.policy)
            known |= {step.name for step in pipeline}
        checked["exclude"] = names("exclude", self.exclude, known)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def is_cacheable(self) -> bool:
        """Whether results can be cached: the code of every pass is in a file, and so has a hash."""
        return self.cache and all(code_of(step) is not None for step in self.pipeline())

    def bound(self, lanes: Collection[Lane], called: float | None = None) -> float | None:
        """The largest error of a lane that may be chosen, of those asked for; None: no limit of the user's.

        If the user leaves the choice between lanes to `optimize`, it is that of `auto_bound`.
        """
        if self.tolerance is None and self.metric is None and len(lanes) > 1:
            return auto_bound(called)
        return self.tolerance

    def io_dtype(self, device: torch.device) -> torch.dtype | None:
        """The dtype of floating-point inputs and outputs; None: the original's."""
        return None if self.io == "original" else lanes_for(self.precision, device, self.amp_dtype)[0].dtype

    def within(self, seconds: float | None) -> Options:
        """These options with a time budget in seconds; None: the default one, see `with_time_for`."""
        if seconds is None:
            return dataclasses.replace(self, budget_s=DEFAULT_S, is_budget_given=False)
        return dataclasses.replace(self, budget_s=seconds, is_budget_given=True)

    def of_parts(self) -> Options:
        """These options for the parts of a model, whose sizes and results are not those of the whole."""
        own = dataclasses.replace(self, dynamic=None)
        return own if self.metric is None else dataclasses.replace(own, metric=None, tolerance=None)

    def without(self, names: Iterable[str]) -> Options:
        """These options without the passes of these names."""
        return dataclasses.replace(self, exclude=sorted({*self.exclude, *names}))

    @property
    def limit_of_whole(self) -> float:
        """The largest error of a model in parts; without a tolerance a metric has to be 0, as everywhere."""
        if self.tolerance is not None:
            return self.tolerance
        return auto_bound(None) if self.metric is None else 0.0

    def with_share(self, share: float) -> Options:
        """These options with a share of their time."""
        return dataclasses.replace(self, budget_s=share * self.budget_s)

    def with_time_for(self, call_s: float, capture_s: float = 0.0) -> Options:
        """These options with the default budget for a model, if none was given, see `default_budget_s`.

        A longer one than that stays.
        """
        if self.is_budget_given:
            return self
        return dataclasses.replace(self, budget_s=max(self.budget_s, default_budget_s(call_s, capture_s)))

    def cache_facts(self) -> dict[str, object]:
        """The options that decide which passes win, for the cache key."""
        named = ("precision", "tolerance", "amp_dtype", "nan", "io")
        asked = {name: getattr(self, name) for name in named}
        return {
            **asked,
            "budget_s": self.budget_s if self.is_budget_given else None,
            "metric": self.metric is not None,
            "passes": [(type(s).__module__, s) for s in self.pipeline()],
            "packages": package_versions(name for e in self.pipeline().engines for name in e.packages),
            "code": [code for step in self.pipeline() if (code := code_of(step))],
        }

    def pipeline(self) -> Pipeline:
        """The pipeline of passes to try."""
        whole = PIPELINE if self.passes is None else as_pipeline(self.passes)
        return Pipeline.of(self._configured(step) for step in whole if not self._leaves_out(step))

    def _leaves_out(self, step: Pass) -> bool:
        return step.name in self.exclude or (isinstance(step, AllowTf32) and self.tolerance is None)

    def _configured(self, step: Pass) -> Pass:
        if isinstance(step, BakeAutocast) and self.passes is None:
            return BakeAutocast(policy=self.policy)
        if isinstance(step, KeepFp32) and self.passes is None:
            return KeepFp32(policy=self.policy)
        if isinstance(step, FuseConvAct) and self.nan == "ignore":
            return dataclasses.replace(step, keeps_nan=False)
        return step
