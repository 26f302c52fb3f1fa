"""Why an engine can read no form of a program."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.search.openings import Opening
from tests.search.test_lane_search import X, net, search
from tests.support.planted import Bench, Compiler, PlantedKernel

__all__ = ["net"]


@dataclasses.dataclass(frozen=True)
class Reader(Compiler):
    """An engine that can read neither kernels nor the model."""

    def why_not(self, program: Program) -> str | None:
        names = {step.name for step in program.recipe}
        return "it reads no kernels" if "kernel" in names else "the model has an inverse"


def test_it_is_told_of_the_program_without_kernels(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost={"kernel": 0.5})
    lane = search(monkeypatch, bench, Pipeline((PlantedKernel("kernel"),), (Reader(),)), Opening(()))
    lane.rewrite(bench.deadline)
    lane.engines.run(bench.deadline)
    found = [entry.reason for entry in bench.ledger.entries if entry.name == "reader"]
    assert found == ["the model has an inverse"]
