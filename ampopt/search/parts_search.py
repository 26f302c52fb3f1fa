"""Optimizes the submodules of a model that is not one graph: in FP32, and then in lower precision."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from torch import nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import first_line, reason_of
from ampopt.ir.lanes import FP32, Lane
from ampopt.measure.ledger import Ledger
from ampopt.search.lower_parts import LowerParts
from ampopt.search.options import Options
from ampopt.search.region import Region, optimize_region
from ampopt.search.rehearsal import Sandbox
from ampopt.search.trials import Progress
from ampopt.search.whole_check import WholeCheck
from ampopt.system.interrupts import interruptible

MAIN = 0.8
"""Share of the time of all submodules from which on one is optimized in FP32 and a lower lane at once.

What begins a search, the references in float64 among it, is then done once.
"""

MOST_REASONS = 8
"""Number of submodules, and of other parts, whose reasons for running as they were are in a report."""


class PartsSearch:
    """The search for one set of submodules; `modules` are those that it has optimized, by name.

    `reports` has their ledgers, `notes` says why others run as they were or stay in FP32. `options` are those
    of a submodule, `took` is the time of each region's first call, `call_s` that of the whole `model`, in
    seconds.
    """

    def __init__(
        self,
        check: WholeCheck,
        model: nn.Module,
        regions: Sequence[Region],
        took: Sequence[float],
        call_s: float,
        options: Options,
        *,
        progress: Progress,
        sandbox: Sandbox,
    ) -> None:
        self._regions, self._took, self._call_s, self._options = regions, took, call_s, options
        self._progress, self._sandbox = progress, sandbox
        self._fp32 = dataclasses.replace(options, precision=FP32.name)
        self.lower = LowerParts(check, model, regions, took, options)
        self.modules: dict[str, OptimizedModule] = {}
        self.reports: dict[str, Ledger] = {}
        self.notes: list[str] = []

    def run(self, seconds: float, left_s: float) -> bool:
        """Optimize them within a time; whether Ctrl-C has ended the work.

        Comparing the whole in both precisions takes a part of `left_s`.
        """
        began = time.perf_counter()
        end, lower_s = began + seconds, 0.0
        if seconds > 0:
            try:
                with interruptible():
                    self.lower.look(self._call_s, seconds)
                lower_s = self.lower.weight_s(end - time.perf_counter())
            except KeyboardInterrupt:
                return True
            except Exception as error:
                self.notes.append(f"lower precision was not tried: {first_line(error)}")
        if self._in_fp32(end, lower_s):
            return True
        rest_s = max(self._call_s - sum(self._took), 0.0)
        was_cut_off = self.lower.optimize(self.modules, end, rest_s, self._progress, self._sandbox)
        try:
            self.lower.settle(0.0 if was_cut_off else left_s - (time.perf_counter() - began))
        except KeyboardInterrupt:
            was_cut_off = True
        except Exception as error:
            self.lower.reasons.append(
                f"submodules stay in FP32: comparing the whole failed: {first_line(error)}"
            )
        self.modules = self.lower.modules
        self.reports.update({name: module.report for name, module in self.modules.items()})
        self.notes += shortened(self.lower.reasons, "more submodules stay in FP32")
        return was_cut_off

    def _in_fp32(self, end: float, lower_s: float) -> bool:
        """Whether Ctrl-C has ended the work.

        Lower precision gets a share of the time until `end`, too, as if it were a submodule of `lower_s`. A
        submodule that takes most of the time is optimized in lower precision at once.
        """
        for index, region in enumerate(self._regions):
            left = end - time.perf_counter()
            if left <= 0 and index > 0:
                count = len(self._regions) - index
                self.notes.append(f"{count} submodules run as they were: the time budget was spent")
                return False
            weights, own_lower_s = sum(self._took[index:]) + lower_s, 0.0
            if lane := self._lane_at_once(index):
                own_lower_s = min(self._took[index], lower_s)
                lower_s -= own_lower_s
            share = max(left * (self._took[index] + own_lower_s) / weights, 0.1)
            try:
                if lane is not None:
                    module, was_cut_off = self._in_both(index, lane, share, end)
                else:
                    module, was_cut_off = self._optimized(index, self._fp32.within(share))
            except KeyboardInterrupt:
                return True
            except Exception as error:
                self.notes.append(f"submodule {region.name} runs as it was: {reason_of(error)}")
                continue
            self.reports[region.name] = module.report
            self.modules[region.name] = module
            if (told := region.captured.told) is not None:
                self.notes.append(f"submodule {region.name}: {told}")
            if was_cut_off:
                return True
        return False

    def _optimized(self, index: int, options: Options) -> tuple[OptimizedModule, bool]:
        region, call_s = self._regions[index], self._took[index]
        return optimize_region(region, options, self._progress, self._sandbox, call_s=call_s)

    def _lane_at_once(self, index: int) -> Lane | None:
        """The lower lane in which a submodule is optimized together with FP32; None: it is not."""
        is_long = self._took[index] >= MAIN * sum(self._took)
        return next(iter(self.lower.lanes_of(self._regions[index])), None) if is_long else None

    def _in_both(self, index: int, lane: Lane, share: float, end: float) -> tuple[OptimizedModule, bool]:
        """A submodule in a lane or in FP32, which is faster; in FP32, until `end`, if the whole is wrong so.

        A search in one lane tries FP32, too. The error that the lane may have is for the whole to judge. If
        its results are empty, the search itself chooses, by the error that a model may have.
        """
        lanes = f"{FP32.name},{lane.name}" if self.lower.is_empty else lane.name
        options = dataclasses.replace(self._options, precision=lanes)
        module, was_cut_off = self._optimized(index, options.within(share))
        if self.lower.takes(self._regions[index], module, lane):
            return module, was_cut_off
        if was_cut_off:
            raise KeyboardInterrupt
        return self._optimized(index, self._fp32.within(max(end - time.perf_counter(), 0.1)))


def shortened(reasons: Sequence[str], more: str) -> list[str]:
    """The first reasons, and how many more there are of what."""
    rest = [f"{len(reasons) - MOST_REASONS} {more}"] if len(reasons) > MOST_REASONS else []
    return [*reasons[:MOST_REASONS], *rest]
