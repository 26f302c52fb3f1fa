"""Passes planted to be caught, a pass manager that reads a made-up clock, and short ways to optimize."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ampopt
from ampopt.deploy.runtime import OptimizedModule
from ampopt.ir.capture import Captured, capture
from ampopt.ir.graph import aten
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import device_of, private_copy
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.signature import flatten_call
from ampopt.ir.transform import Declined, Engine, Family, Numerics, Pass, Recipe, Result
from ampopt.measure import headline
from ampopt.measure.entry import Entry
from ampopt.measure.ledger import Ledger
from ampopt.measure.sampling import Gain, Measurement
from ampopt.measure.verify import Verifier
from ampopt.passes import PIPELINE
from ampopt.search import last_comparison
from ampopt.search.lane_search import LaneSearch
from ampopt.search.lane_state import LaneState
from ampopt.search.pass_manager import PassManager
from tests.support.rewritten import rewritten

KEEP = Gain(2.0, 1.9, 2.1)


def rewriting(passes: Sequence[Pass]) -> Pipeline:
    """The pipeline with these passes as its rewrites."""
    return dataclasses.replace(PIPELINE, rewrites=tuple(passes))


def keep_the_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last comparison find the optimized model twice as fast, whatever the clock says."""
    _take(monkeypatch, 1.0)


def keep_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last comparison find the optimized model half as fast, whatever the clock says."""
    _take(monkeypatch, 4.0)
    monkeypatch.setattr(last_comparison, "gain", lambda before, after: Gain(0.5, 0.5, 0.5))


def _take(monkeypatch: pytest.MonkeyPatch, after: float) -> None:
    def measured(samplers: dict[str, Any], **options: Any) -> dict[str, Measurement]:
        for sampler in samplers.values():
            sampler()
        return {name: Measurement((after if name == "after" else 2.0,) * 6) for name in samplers}

    monkeypatch.setattr(headline, "interleave", measured)


NO_ENGINES = ("compile", "onnx-runtime", "openvino", "parallel-branches", "script")


def optimize(model: nn.Module, example_inputs: Any = None, **options: Any) -> Any:
    """`ampopt.optimize` without engines, and silent."""
    options.setdefault("budget_s", 60.0)
    return ampopt.optimize(model, example_inputs, exclude=NO_ENGINES, progress=False, **options)


def captured_of(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[nn.Module, Captured]:
    """A private copy of a model, and the capture of a call of it."""
    original = private_copy(model)
    return original, capture(original, args, kwargs, device_of(original, flatten_call(args, kwargs)[0]))


def module_of(model: nn.Module, *args: Any, passes: tuple[Pass, ...] = (), **options: Any) -> OptimizedModule:
    """An OptimizedModule with a given recipe, made without timing anything."""
    original, captured = captured_of(model, *args)
    recipe = Recipe(FP32, passes)
    program = captured.program
    for step in passes:
        program = step.apply(program).program
    return OptimizedModule(original, captured, program, recipe, Ledger("model", {}, ()), **options)


@dataclasses.dataclass(frozen=True)
class Doing(Pass):
    """Calls a function with the program that it is given; the result is its own, or that nothing changed."""

    numerics = Numerics.REASSOCIATED
    family = Family.REWRITE
    portable = True

    work: Callable[[Program], object]

    def apply(self, program: Program) -> Result:
        """Call it."""
        result = self.work(program)
        return result if isinstance(result, Result) else Result(program, 0)


@dataclasses.dataclass(frozen=True)
class Planted(Pass):
    """Multiply the first output by `factor` and add `plus`; raise `error` instead where there is one."""

    numerics = Numerics.REASSOCIATED
    family = Family.REWRITE
    portable = True

    label: str
    factor: float = 1.0
    plus: float = 0.0
    error: BaseException | None = None
    seconds: float = 0.0
    declined: tuple[Declined, ...] = ()

    @property
    def name(self) -> str:
        """Its label."""
        return self.label

    def expected_seconds(self, program: Program) -> float:
        """As long as it was told to say."""
        return self.seconds

    def apply(self, program: Program) -> Result:
        """Do what it was planted for."""
        if self.error is not None:
            raise self.error
        if self.declined:
            return Result(program, 0, self.declined)
        program = rewritten(program, aten.mul.Tensor, self.factor)
        return Result(rewritten(program, aten.add.Tensor, self.plus) if self.plus else program, 1)


@dataclasses.dataclass(frozen=True)
class PlantedBitwise(Planted):
    """One that claims to keep every bit."""

    numerics = Numerics.BITWISE


@dataclasses.dataclass(frozen=True)
class PlantedKernel(Planted):
    """One that later changes have to be made under."""

    family = Family.KERNEL


@dataclasses.dataclass(frozen=True)
class PlantedFoundation(Planted):
    """One that others build on."""

    enables_others = True


@dataclasses.dataclass(frozen=True)
class Compiler(Engine):
    """An engine that runs the graph as it is."""

    def apply(self, program: Program) -> Result:
        """See the class."""
        return Result(program.replace(engine=program.graph), 1)


Cost = Callable[[frozenset[str]], float]
"""Seconds that a call of a program takes, by the names of the passes in its recipe."""


class Bench:
    """A pass manager over one model whose clock says what `cost` says."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        model: nn.Module,
        *args: Any,
        cost: Cost | Mapping[str, float],
        seconds_left: float = 1e6,
        lane: Lane = FP32,
        **verifier: Any,
    ) -> None:
        table = cost

        def latency(call: Any, device: torch.device, **_: float) -> Callable[[], float]:
            names = frozenset(step.name for step in call.__self__.program.recipe)
            if callable(table):
                return lambda: table(names)
            return lambda: float(torch.tensor([table.get(name, 1.0) for name in sorted(names)]).prod())

        for sampler in ("latency", "engine_latency"):
            monkeypatch.setattr(f"ampopt.search.trial_timer.{sampler}", latency)
        original, captured = captured_of(model, *args)
        self.ledger = Ledger("model", {}, ())
        self.verifier = Verifier(original, captured, **verifier)
        self.deadline = time.perf_counter() + seconds_left
        self.manager = PassManager(
            captured.program, self.verifier, self.ledger, deadline=self.deadline, sample_s=0.0
        )
        self.state: LaneState = self.manager.open(lane)

    def search(self, *passes: Pass) -> LaneSearch:
        """The search of the lane with these passes."""
        return LaneSearch(self.manager, self.state, Pipeline.of(passes))

    def rewrite(self, *passes: Pass) -> list[Entry]:
        """The ledger's rows after these passes were tried."""
        engines = [step for step in passes if step.family is Family.ENGINE]
        search = self.search(*(step for step in passes if step not in engines))
        search.rewrite(self.deadline)
        search.vary(self.deadline)
        self.run_in([step for step in engines if isinstance(step, Engine)], ())
        return self.ledger.entries

    def run_in(self, engines: Sequence[Engine], launches: Sequence[Pass]) -> None:
        """Try these engines with these launches on what was kept."""
        self.search(*launches).engines.run_in(engines, self.deadline)

    @property
    def kept(self) -> list[str]:
        """The names of the passes in the best program, in order."""
        return [step.name for step in self.state.best.program.recipe]
