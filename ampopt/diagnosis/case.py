"""The case: what was measured of a model, and the means to execute a finding's counterfactual."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ampopt.diagnosis.accuracy import LayerError
from ampopt.diagnosis.ceilings import Ceilings
from ampopt.diagnosis.finding import Counterfactual
from ampopt.diagnosis.heap import Refilled
from ampopt.diagnosis.layers import Layer
from ampopt.diagnosis.operators import Kernel
from ampopt.diagnosis.watch import Watched
from ampopt.engines.executable import executable
from ampopt.errors import first_line
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.program import Program
from ampopt.ir.signature import map_tensors
from ampopt.ir.transform import Pass
from ampopt.measure.clocks import latency
from ampopt.measure.sampling import Measurement, gain, interleave
from ampopt.system.budget import Budget
from ampopt.system.interrupts import check_interrupted

LEAST, MOST = 6, 60
"""Rounds of a counterfactual: fewer than six pairs bear no interval of 95 %."""

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
    program: Program | None = None
    not_a_graph: str | None = None
    lanes: dict[str, Lane] = dataclasses.field(default_factory=dict)
    latency: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    device_time: dict[str, Measurement] = dataclasses.field(default_factory=dict)
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

    def start(self, lane: Lane) -> Program | None:
        """The captured graph as a lane starts with it."""
        return None if self.program is None else lane.start(self.program)

    def has_time(self, call_s: float) -> bool:
        """Whether the budget has room for one more counterfactual of calls of this many seconds."""
        return max(SECONDS, 2 * (LEAST + 2) * call_s) < self.budget.left_s

    def counterfactual(
        self,
        change: str,
        before: Callable[[], object],
        after: Callable[[], object],
        *,
        of: str = "a call",
        seconds: float = SECONDS,
    ) -> Counterfactual:
        """Run and time two ways in turn."""
        samplers = {"before": latency(before, self.device), "after": latency(after, self.device)}
        found = interleave(samplers, seconds=seconds, least=LEAST, most=MOST)
        return Counterfactual(
            change, found["before"], found["after"], gain(found["before"], found["after"]), of
        )

    def with_passes(
        self, change: str, lane: Lane, *steps: Pass, on_top_of: tuple[Pass, ...] = ()
    ) -> tuple[Counterfactual, int] | None:
        """The graph in a lane with passes against without, and the passes' rewrites.

        None if the passes change nothing, cannot be applied, or no time is left. `on_top_of` are passes that
        both have.
        """
        program = self.start(lane)
        if program is None or lane.name not in self.latency:
            return None
        if not self.has_time(self.latency[lane.name].median):
            self.untried.append(f"{change} in the {lane.name} lane")
            return None
        try:
            program, _ = _after(on_top_of, program)
            changed, rewrites = _after(steps, program)
            if not rewrites:
                return None
            before, after = executable(program), executable(changed)
            inputs = program.examples
            ran = self.counterfactual(change, lambda: before(*inputs), lambda: after(*inputs))
        except Exception as error:
            check_interrupted(error)
            self.notes.append(f"not tried: {change} in the {lane.name} lane ({first_line(error)})")
            return None
        if not ran.helps:
            self.notes.append(f"tried in the {lane.name} lane, not certainly faster: {ran}")
        return ran, rewrites


def _after(steps: tuple[Pass, ...], program: Program) -> tuple[Program, int]:
    """A program after passes, and the number of their rewrites; what declines is left out."""
    count = 0
    for step in steps:
        if step.why_not(program) is None:
            result = step.apply(program)
            program, count = result.program, count + result.rewrites
    return program, count


def eager_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device, lane: Lane
) -> Callable[[], object]:
    """A call of a model in a lane, without gradients, as eager answers it."""

    def call() -> object:
        with lane.scope(device):
            return model(*args, **kwargs)

    return call


def timed_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    return latency(call, device, last_s=float("inf"))()


def own_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with tensors of its own, on the devices where they are."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return map_tensors(lambda tensor: tensor.detach().clone(), args, kwargs)
