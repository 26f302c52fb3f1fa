"""Cases of a diagnosis with times that are made up, for findings that must not depend on the clock."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor, nn

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.ceilings import Ceilings
from ampopt.diagnosis.finding import Counterfactual
from ampopt.diagnosis.layers import layers_of
from ampopt.diagnosis.operators import Spent
from ampopt.diagnosis.watch import watch
from ampopt.diagnosis.work import works
from ampopt.ir.lanes import FP32, lanes_for
from ampopt.ir.model_copy import private_copy
from ampopt.measure.sampling import Measurement, gain
from ampopt.system.budget import Budget
from tests.helpers import program_of

CPU = torch.device("cpu")
CEILINGS = Ceilings(bandwidth=1e10, rates={"fp32": 1e11, "bfloat16": 2e11}, launch_s=1e-6)


def taking(milliseconds: float) -> Measurement:
    """Samples that take this long, all of them."""
    return Measurement((1e-3 * milliseconds,) * 20)


def case_of(
    model: nn.Module,
    *inputs: Tensor,
    latency_ms: Mapping[str, float] | None = None,
    spent: Callable[[str], Spent] = lambda name: Spent(1e-3),
) -> Case:
    """A case whose lanes take `latency_ms`, and whose operators, by name, cost what `spent` says."""
    model = model.eval() if not model.training else model
    program = program_of(model, *inputs)
    lanes = {lane.name: lane for lane in lanes_for("fp32,amp", CPU)}
    times = {"fp32": 10.0, "amp": 10.0} if latency_ms is None else latency_ms
    found = {"fp32": works(program)} | {lane: works(lanes[lane].start(program)) for lane in times}
    by_lane = {lane: {name: spent(name) for name in found["fp32"]} for lane in times}
    return Case(
        model=model,
        given=(inputs, {}),
        original=private_copy(model),
        args=inputs,
        kwargs={},
        device=CPU,
        watched=watch(private_copy(model), inputs, {}, CPU),
        ceilings=CEILINGS,
        budget=Budget(time.perf_counter(), 1e6),
        program=program,
        lanes=lanes,
        latency={lane: taking(each) for lane, each in times.items()},
        layers=layers_of(found, by_lane, {lane: lanes[lane].dtype for lane in times}, CEILINGS),
    )


def every_remedy_helps(monkeypatch: pytest.MonkeyPatch, times: float = 2.0) -> None:
    """Let every counterfactual run once both ways, and say that it is so many times faster."""

    def counterfactual(
        self: Case,
        change: str,
        before: Callable[[], object],
        after: Callable[[], object],
        *,
        of: str = "a call",
        seconds: float = 0.0,
        elsewhere: Executor | None = None,
    ) -> Counterfactual:
        before()
        after()
        slow, fast = taking(times), taking(1.0)
        return Counterfactual(change, slow, fast, gain(slow, fast), of)

    monkeypatch.setattr(Case, "counterfactual", counterfactual)


def fp32_only(case: Case) -> Case:
    """The case without its mixed lane."""
    return dataclasses.replace(case, lanes={"fp32": FP32}, latency={"fp32": case.latency["fp32"]})
