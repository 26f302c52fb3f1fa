"""The case: what was measured of a model, and the means to execute a finding's counterfactual."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

import torch
from torch import nn

from ampopt.diagnosis.accuracy import LayerError
from ampopt.diagnosis.ceilings import Ceilings
from ampopt.diagnosis.finding import Counterfactual
from ampopt.diagnosis.heap import Refilled
from ampopt.diagnosis.layers import Layer
from ampopt.diagnosis.operators import Kernel
from ampopt.diagnosis.usage import Usage, usage_of
from ampopt.diagnosis.watch import Watched
from ampopt.engines.executable import executable
from ampopt.errors import first_line
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import working_copy
from ampopt.ir.program import Program
from ampopt.ir.settings import Settings
from ampopt.ir.signature import map_tensors
from ampopt.ir.transform import Pass
from ampopt.measure.clocks import latency, settled_latency
from ampopt.measure.headline import ENOUGH, NARROW, Load
from ampopt.measure.sampling import Measurement, gain, interleave
from ampopt.passes import BakeAutocast
from ampopt.system import flags
from ampopt.system.budget import Budget
from ampopt.system.interrupts import check_interrupted
from ampopt.system.meters import why_no_gpu_meter

LEAST, MOST = 6, 60
"""Rounds of a counterfactual: fewer than six pairs bear no interval of 95 %."""

LEAST_GAPS = 0.2
"""From this share of a call, or of a training step, on, the gaps between kernels are told."""

SECONDS = 1.0
"""Time for the samples of a counterfactual, unless `LEAST` rounds take longer."""


@dataclasses.dataclass
class Case:
    """What findings read. Dicts are by lane; a lane that is too slow to be sampled is in none of them.

    `model` is the user's, in its own mode, and is never called; `given` its call as it was given, on whatever
    devices. `original` is a private copy in evaluation mode and `args`, `kwargs` the call, both on `device`.
    `program` is the captured graph, None where there is none for the reason in `not_a_graph`.
    """

    model: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    original: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    watched: Watched
    ceilings: Ceilings
    budget: Budget
    first_call_s: float = 0.0
    refilled: Refilled | None = None
    load: Load | None = None
    """Of other work on the machine: as it was before anything was measured."""
    program: Program | None = None
    not_a_graph: str | None = None
    lanes: dict[str, Lane] = dataclasses.field(default_factory=dict)
    latency: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    device_time: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    usage: dict[str, Usage] = dataclasses.field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    accuracy: dict[str, tuple[LayerError, ...]] = dataclasses.field(default_factory=dict)
    too_slow: dict[str, float] = dataclasses.field(default_factory=dict)
    """Lanes of which a call took this many seconds or more, and was not sampled."""
    notes: list[str] = dataclasses.field(default_factory=list)
    untried: list[str] = dataclasses.field(default_factory=list)
    """What there was no time for."""

    def kernels(self, lane: str) -> list[Kernel]:
        """The kernels of one call, in order; none on a CPU."""
        return [
            kernel for layer in self.layers if lane in layer.spent for kernel in layer.spent[lane].kernels
        ]

    def eager(self, lane: Lane = FP32) -> Callable[[], object]:
        """A call of a copy of the model in a lane."""
        return eager_call(self.original, self.args, self.kwargs, self.device, lane)

    @property
    def is_busy(self) -> bool:
        """Whether other work took more than the machine has cores; False if the system does not tell."""
        return self.load is not None and self.load.is_high

    def start(self, lane: Lane) -> Program | None:
        """The captured graph as a lane starts with it."""
        return None if self.program is None else lane.start(self.program)

    def has_time(self, what: str, seconds: float) -> bool:
        """Whether the budget has room for what takes this many seconds; noted, once, where it has not."""
        if seconds < self.budget.left_s:
            return True
        if what not in self.untried:
            self.untried.append(what)
        return False

    def note_once(self, note: str) -> None:
        """Add a note that each lane would make."""
        if note not in self.notes:
            self.notes.append(note)

    def read_usage(self, lane: str, call: Callable[[], object], call_s: float) -> None:
        """Read the clocks, the power and the energy of calls that take so many seconds."""
        if not self.has_time(f"the power of a call in {lane}", trial_s(call_s)):
            return
        try:
            found = usage_of(call, self.device)
        except Exception as error:
            check_interrupted(error)
            self.notes.append(f"the power of a call in {lane} could not be read: {first_line(error)}")
            return
        if found is None:
            if self.device.type == "cuda":
                self.note_once(f"no clocks, power and energy: {why_no_gpu_meter()}")
            return
        self.usage[lane] = found
        if found.is_slowed:
            why = f": {', '.join(found.slowed)}" if found.slowed else ""
            clocks = f"{found.sm_mhz:.0f} of {found.most_sm_mhz:.0f} MHz"
            self.notes.append(f"the GPU ran at {clocks} in {lane}{why}")

    def counterfactual(
        self,
        change: str,
        before: Callable[[], object],
        after: Callable[[], object],
        *,
        of: str = "a call",
        seconds: float = SECONDS,
        elsewhere: Executor | None = None,
    ) -> Counterfactual:
        """Run and time two ways in turn, until their interval is narrow.

        With `elsewhere` the second one runs in its thread.
        """
        changed = settled_latency(after, self.device)
        samplers = {
            "before": settled_latency(before, self.device),
            "after": changed if elsewhere is None else lambda: flags.work_elsewhere(elsewhere, changed),
        }

        def is_told(timed: Mapping[str, Measurement]) -> bool:
            found = gain(timed["before"], timed["after"])
            return len(timed["before"].samples) >= ENOUGH and found.high <= NARROW * found.low

        found = interleave(samplers, seconds=seconds, least=LEAST, most=MOST, until=is_told)
        return Counterfactual(
            change, found["before"], found["after"], gain(found["before"], found["after"]), of
        )

    def remedied(
        self,
        change: str,
        lane: Lane,
        make: Callable[[], Callable[[], object]],
        *,
        elsewhere: Executor | None = None,
    ) -> Counterfactual | None:
        """A call against one with a remedy, which `make` makes; None, and noted, where it cannot be executed.

        `elsewhere`: see `counterfactual`.
        """
        return self._executed(change, lane, lambda: (self.eager(lane), make()), elsewhere=elsewhere)

    def against_eager(self, change: str, lane: Lane, step: Pass) -> Counterfactual | None:
        """A call against its graph after a pass, for a remedy that replaces what eager does around operators.

        None if the pass changes nothing, or it cannot be executed.
        """
        program = self.start(lane)

        def make() -> tuple[Callable[[], object], Callable[[], object]] | None:
            assert program is not None
            changed, rewrites = _after((step,), program)
            return (self.eager(lane), _run_of(changed)) if rewrites else None

        return None if program is None else self._executed(change, lane, make)

    def rewritten(self, change: str, lane: Lane, step: Pass) -> tuple[Counterfactual, int] | None:
        """The graph after a pass against the graph before it, and the pass's rewrites; None as above.

        In a mixed lane both have autocast's casts in them, unless the pass writes them. What eager
        does around operators is in neither.
        """
        program, count = self.start(lane), 0

        def make() -> tuple[Callable[[], object], Callable[[], object]] | None:
            nonlocal count
            assert program is not None
            bakes = lane.is_mixed and not isinstance(step, BakeAutocast)
            baked, _ = _after((BakeAutocast(),) if bakes else (), program)
            changed, count = _after((step,), baked)
            return (_run_of(baked), _run_of(changed)) if count else None

        ran = None if program is None else self._executed(change, lane, make, of="its graph")
        return None if ran is None else (ran, count)

    def _executed(
        self,
        change: str,
        lane: Lane,
        make: Callable[[], tuple[Callable[[], object], Callable[[], object]] | None],
        *,
        of: str = "a call",
        elsewhere: Executor | None = None,
    ) -> Counterfactual | None:
        """Make both ways and time them; what fails, does not help or has no time is noted."""
        if lane.name not in self.latency:
            return None
        needed_s = trial_s(self.latency[lane.name].median)
        if not self.has_time(f"{change} in the {lane.name} lane", needed_s):
            return None
        try:
            if (both := make()) is None:
                return None
            ran = self.counterfactual(change, *both, of=of, elsewhere=elsewhere)
        except Exception as error:
            check_interrupted(error)
            self.notes.append(f"not tried: {change} in the {lane.name} lane ({first_line(error)})")
            return None
        if not ran.helps:
            self.notes.append(f"tried in the {lane.name} lane, not certainly faster: {ran}")
        return ran


def trial_s(call_s: float) -> float:
    """Seconds that a counterfactual of calls of this many seconds takes."""
    return max(SECONDS, 2 * (LEAST + 2) * call_s)


def _run_of(program: Program) -> Callable[[], object]:
    run, inputs = executable(program), program.examples
    return lambda: run(*inputs)


def _after(steps: tuple[Pass, ...], program: Program) -> tuple[Program, int]:
    """A program after passes, and the number of their rewrites; what declines is left out."""
    count = 0
    for step in steps:
        if step.why_not(program) is None:
            result = step.apply(program)
            program, count = result.program, count + result.rewrites
    return program, count


def eager_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    lane: Lane,
    settings: Settings | None = None,
) -> Callable[[], object]:
    """A call of a copy of a model in a lane, without gradients, as its user makes it.

    What the model keeps from a call is the copy's own: it has the dtypes of its lane. Autocast keeps the
    weights that it has cast until its end, which it does for those that require gradients.
    """
    around, own = settings or Settings(), working_copy(model)

    def call() -> object:
        with around.scope(device), _autocast(device, lane):
            return own(*args, **kwargs)

    return call


def _autocast(device: torch.device, lane: Lane) -> contextlib.AbstractContextManager[object]:
    on = lane.autocast is not None
    return torch.autocast(device.type, dtype=lane.autocast) if on else contextlib.nullcontext()


def trained_as(model: nn.Module, given: nn.Module) -> None:
    """Let those weights of a copy require gradients that do in the model that it is of."""
    asking = {name for name, weight in given.named_parameters() if weight.requires_grad}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in asking)


def timed_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    return latency(call, device, last_s=float("inf"))()


def own_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with tensors of its own, on the devices where they are."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return map_tensors(lambda tensor: tensor.detach().clone(), args, kwargs)
