"""What is to lead, and a lane's winner, are verified far outside of the examples' range."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.graph import aten, copy_of, finish, insert_call
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Result
from ampopt.measure.entry import Verdict
from ampopt.search import trials
from tests.support.planted import Bench, Planted


@dataclasses.dataclass(frozen=True)
class WrongAtLargeInputs(Planted):
    """Right within the examples' range and for faults, and zero where the largest number is over 50."""

    def apply(self, program: Program) -> Result:
        """Multiply by 0 there."""
        module = copy_of(program.graph)
        output = module.graph.output_node()
        first = output.all_input_nodes[0]
        (x,) = module.graph.find_nodes(op="placeholder")
        largest = insert_call(module, output, aten.max.default, x)
        number = insert_call(module, output, aten.nan_to_num.default, largest, 0.0, 0.0, 0.0)
        small = insert_call(module, output, aten.lt.Scalar, number, 50.0)
        output.replace_input_with(first, insert_call(module, output, aten.mul.Tensor, first, small))
        return Result(program.with_graph(finish(module)), 1)


@pytest.fixture
def only_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take so long that nothing but a lane's winner is verified there."""
    monkeypatch.setattr(trials, "LOOKING_FAR", 0.0)


def test_what_is_wrong_there_does_not_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after it has to be faster than what is right, and is kept."""
    cost = {"narrow": 0.3, "sure": 0.7}
    bench = Bench(monkeypatch, nn.Linear(8, 4), torch.randn(2, 8), cost=cost)
    narrow, sure = bench.rewrite(WrongAtLargeInputs("narrow"), Planted("sure"))
    assert (narrow.name, narrow.verdict) == ("narrow", Verdict.REVERTED)
    assert narrow.reason.startswith("faster, but wrong elsewhere: output 0 with inputs x100: error 1 is over")
    assert (sure.name, sure.verdict) == ("sure", Verdict.KEPT)
    assert bench.kept == ["sure"]


def test_what_leads_is_not_verified_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(8, 4), torch.randn(2, 8), cost={"good": 0.5})
    bench.rewrite(Planted("good"))
    monkeypatch.setattr(bench.verifier, "check", lambda *a, **k: pytest.fail("it was verified"))
    bench.manager.settle(bench.state)
    assert bench.state.check is bench.state.best.settled
    assert bench.state.check is not None


@pytest.mark.usefixtures("only_winners")
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_winner_that_is_wrong_outside_of_the_examples_range_loses_the_pass_that_is(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    passes: list[Planted] = [Planted(f"good{number}") for number in range(3)]
    passes.insert(place, WrongAtLargeInputs("narrow"))
    costs = {step.name: 0.5 for step in passes}
    bench = Bench(monkeypatch, nn.Linear(8, 4), torch.randn(2, 8), cost=costs)
    bench.rewrite(*passes)
    assert "narrow" in bench.kept
    bench.manager.settle(bench.state)
    assert bench.state.check is not None
    assert bench.state.check.passed
    assert bench.kept == ["good0", "good1", "good2"]
    last = bench.ledger.entries[-1]
    assert (last.name, last.verdict) == ("narrow", Verdict.REVERTED)
    assert "inputs x100" in last.reason


@dataclasses.dataclass(frozen=True)
class Choosing(Engine):
    """An engine with a faster form that is wrong at large inputs."""

    form: str
    raises: bool = False

    @property
    def name(self) -> str:
        """Its form's."""
        return self.form

    def apply(self, program: Program) -> Result:
        """Multiply by 0 there, or raise an error, if it is that form."""

        def run(x: Tensor) -> tuple[Tensor, ...]:
            (y,) = program.graph(x)
            is_small = x.max().nan_to_num(0, 0, 0) < 50
            if self.raises and self.form == "fast" and not is_small:
                raise ValueError("too large")
            return (y * is_small if self.form == "fast" else y,)

        return Result(program.replace(engine=run), 1)


@pytest.mark.usefixtures("only_winners")
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("forms", "kept"), [(("sure", "fast"), ["good", "sure"]), (("fast",), ["good"])])
def test_an_engine_that_is_wrong_there_gives_way_to_what_was_the_best_before_it(
    monkeypatch: pytest.MonkeyPatch, forms: tuple[str, ...], kept: list[str], raises: bool
) -> None:
    cost = {"good": 0.9, "sure": 0.5, "fast": 0.3}
    bench = Bench(monkeypatch, nn.Linear(8, 4), torch.randn(2, 8), cost=cost)
    bench.rewrite(Planted("good"), *(Choosing(form, raises) for form in forms))
    assert bench.kept == ["good", "fast"]
    bench.manager.settle(bench.state)
    assert bench.kept == kept
    assert bench.state.check is not None
    assert bench.state.check.passed
    assert bench.state.former == []


@pytest.mark.usefixtures("only_winners")
def test_a_lane_that_is_wrong_from_the_start_is_left_with_no_pass_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, nn.Linear(8, 4), torch.randn(2, 8), cost={"good": 0.5})
    bench.rewrite(Planted("good"))
    monkeypatch.setattr(bench.verifier, "check", lambda *a, **k: Check(1.0, 0.1, "wrong"))
    bench.manager.settle(bench.state)
    assert bench.state.check == Check(1.0, 0.1, "wrong")
    assert bench.kept == []
