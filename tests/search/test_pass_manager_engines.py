"""Ways to run and to launch, planted: which are tried, in which form of the program, and what is kept."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Family, Numerics, Pass, Result
from ampopt.measure.entry import Verdict
from tests.support.planted import Bench, Planted, PlantedKernel

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
GOOD = Planted("good")


@pytest.fixture
def net() -> nn.Module:
    return nn.Linear(4, 4).eval()


@dataclasses.dataclass(frozen=True)
class _Engine(Engine):
    def why_not(self, program: Program) -> str | None:
        kernels = any(step.family is Family.KERNEL for step in program.recipe)
        return "it cannot see into kernels" if kernels else None

    def apply(self, program: Program) -> Result:
        return Result(program.replace(engine=program.graph), 1)


class _Shy(_Engine):
    """Refuses everything."""

    def why_not(self, program: Program) -> str | None:
        return "not today"


@dataclasses.dataclass(frozen=True)
class _Launch(Pass):
    """Refuses to launch what an engine runs where it was told so."""

    numerics = Numerics.REASSOCIATED
    family = Family.LAUNCH
    portable = False

    fails: bool = False

    def apply(self, program: Program) -> Result:
        if self.fails:
            raise RuntimeError("it cannot be captured")
        return Result(program.replace(settings=dataclasses.replace(program.settings, tf32=True)), 1)


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_is_tried_by_itself_only_where_it_cannot_be_launched(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, fails: bool
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"good": 0.8, "_-engine": 0.5, "_-launch": 0.9})
    bench.rewrite(GOOD)
    bench.run_in([_Engine()], [_Launch(fails=fails)])
    rows = [(entry.name, entry.verdict) for entry in bench.ledger.entries[1:]]
    if fails:
        assert rows == [("_-engine + _-launch", Verdict.FAILED), ("_-engine", Verdict.KEPT)]
    else:
        assert rows == [("_-engine + _-launch", Verdict.KEPT)]


def test_an_engine_that_refuses_is_one_row(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost={})
    bench.run_in([_Shy()], [_Launch()])
    assert [(e.name, e.verdict) for e in bench.ledger.entries] == [("_-shy + _-launch", Verdict.DECLINED)]


@dataclasses.dataclass(frozen=True)
class _ChangesBits(Planted, Engine):
    """Claims to keep every bit, as do those before and after it."""

    numerics = Numerics.BITWISE
    family = Family.ENGINE


def test_a_claim_to_keep_every_bit_is_checked_for_an_engine_that_is_launched(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    class _ExactLaunch(_Launch):
        numerics = Numerics.BITWISE

    bench = Bench(monkeypatch, net, X, cost={"changes": 0.5})
    bench.run_in([_ChangesBits("changes", factor=1.0 + 2.0**-23)], [_ExactLaunch()])
    first = bench.ledger.entries[0]
    assert first.name.startswith("changes + ")
    assert (first.verdict, first.reason) == (Verdict.REVERTED, "it claims to keep every bit and does not")


def test_an_engine_that_cannot_read_kernels_gets_the_program_without_them(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"kernel": 0.9, "good": 0.8, "_-engine": 0.5})
    bench.rewrite(GOOD, PlantedKernel("kernel"))
    bench.run_in([_Engine()], [])
    last = bench.ledger.entries[-1]
    assert last.name.endswith("(unfused)")
    assert last.verdict is Verdict.KEPT
    assert [name for name in bench.kept if "engine" not in name] == ["good"]


def test_an_engine_that_takes_long_is_tried_without_each_kind_of_kernel(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    class _SlowEngine(_Engine):
        slow_to_apply = True

        def why_not(self, program: Program) -> str | None:
            return None

    def cost(names: frozenset[str]) -> float:
        engine = any("engine" in name for name in names)
        return 0.2 if engine and "right" in names and "left" not in names else 0.9 ** len(names)

    bench = Bench(monkeypatch, net, X, cost=cost)
    bench.rewrite(PlantedKernel("left"), PlantedKernel("right"))
    bench.run_in([_SlowEngine()], [])
    assert bench.kept == ["right", "_-slow-engine"]
    tried = [entry.name.partition(" ")[2] for entry in bench.ledger.entries[-4:]]
    assert tried == ["(unfused)", "", "(without left)", "(without right)"]
