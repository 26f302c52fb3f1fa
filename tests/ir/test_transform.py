"""A pass names and explains itself, says what it did, and is replayed on other captures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Engine, Family, Numerics, Pass, Rehearsed, Result, is_slow, replay
from tests.helpers import BF16, program_of
from tests.support.planted import Planted
from tests.support.rewritten import rewritten

X = torch.tensor([[1.0, 2.0]])
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class AddsToInput(Pass):
    """Adds a number to the output.

    And says more below.
    """

    numerics = Numerics.BITWISE
    family = Family.REWRITE
    portable = True

    number: float = 0.0

    def apply(self, program: Program) -> Result:
        """Adds nothing where the number is zero; else the replay adds twice as much."""
        if not self.number:
            return Result(program, 0)
        changed = rewritten(program, aten.add.Tensor, self.number)
        return Result(changed, 1, replay=dataclasses.replace(self, number=2 * self.number))


@dataclasses.dataclass(frozen=True)
class Refused(Planted):
    """One that cannot be applied to any program."""

    def why_not(self, program: Program) -> str | None:
        """Always the same."""
        return "never"


@dataclasses.dataclass(frozen=True)
class Runner(Engine):
    """Runs the graph as it is."""

    slow_to_apply = True

    def apply(self, program: Program) -> Result:
        """Let the graph be the engine."""
        return Result(program.replace(engine=program.graph), 1)


@dataclasses.dataclass(frozen=True)
class NeedsMissing(Runner):
    """Needs a package that no machine has."""

    packages = ("torch", "ampopt_package_that_nobody_wrote")
    slow_to_apply = False


@dataclasses.dataclass(frozen=True)
class NeedsMissingExtra(NeedsMissing):
    """Needs one that an extra brings."""

    extra = "planted"


def identity_program() -> Program:
    return program_of(nn.ReLU(), X)


def output_of(program: Program) -> list[float]:
    values: list[float] = program.run(X)[0].flatten().tolist()
    return values


def test_a_pass_is_named_after_its_class_and_summed_up_by_its_first_line() -> None:
    step = AddsToInput()
    assert step.name == "adds-to-input"
    assert Runner().name == "runner"
    assert step.summary == "Adds a number to the output."


def test_a_pass_promises_nothing_beyond_its_class_and_is_not_changed() -> None:
    step, program = AddsToInput(1.0), identity_program()
    assert step.numerics_on(program) is Numerics.BITWISE
    assert step.why_not(program) is None
    assert step.expected_seconds(program) == 0.0
    assert step.within(0.1) is step
    assert not step.enables_others
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.number = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("base", [Pass, Engine])
def test_a_pass_without_apply_cannot_be_made(base: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"abstract method '?apply"):
        base()


def test_a_result_is_modified_by_rewrites_and_by_nothing_else() -> None:
    program = identity_program()
    assert Result(program, 1).modified
    assert not Result(program, 0, (Declined("x", "no"),), ("hint",), AddsToInput()).modified


def test_an_engine_is_declined_for_a_missing_package_and_under_autocast() -> None:
    program = identity_program()
    under_autocast = program.replace(lane=BF16, under_autocast=True)
    assert Runner().why_not(program) is None
    assert Runner().why_not(under_autocast) == "it still runs under autocast"
    missing = "ampopt_package_that_nobody_wrote"
    for asked in (program, under_autocast):
        assert NeedsMissing().why_not(asked) == f"{missing} is not installed: run  pip install {missing}"
    told = f"{missing} is not installed: run  pip install 'ampopt[planted]'"
    assert NeedsMissingExtra().why_not(program) == told


def test_an_engine_is_applied_beside_its_rehearsal_only_after_that_has_ended_well() -> None:
    program, order = identity_program(), list[str]()

    @dataclasses.dataclass(frozen=True)
    class Noting(Runner):
        """Notes when it is applied."""

        def apply(self, program: Program) -> Result:
            """As any other."""
            order.append("applied")
            return super().apply(program)

    def succeeds() -> Rehearsed:
        order.append("rehearsed")
        return Rehearsed()

    result = Noting().apply_beside(program, succeeds)
    assert order == ["rehearsed", "applied"]
    assert result.program.engine is program.graph

    def fails() -> Rehearsed:
        raise RuntimeError("the rehearsal failed")

    with pytest.raises(RuntimeError, match="the rehearsal failed"):
        Noting().apply_beside(program, fails)
    assert order == ["rehearsed", "applied"]


def test_an_engine_in_a_hurry_is_itself_and_only_engines_are_slow() -> None:
    runner = Runner()
    assert runner.hurried() is runner
    assert is_slow(runner)
    assert not is_slow(NeedsMissing())
    assert not is_slow(AddsToInput())


def test_a_replay_applies_passes_in_order_on_top_of_each_other() -> None:
    program = identity_program()
    steps = (Planted("triple", factor=3.0), Planted("plus", plus=1.0))
    replayed = replay(steps, program)
    assert output_of(replayed) == [4.0, 7.0]
    assert output_of(replay(steps[::-1], program)) == [6.0, 9.0]
    assert replayed.recipe == steps
    assert output_of(program) == [1.0, 2.0]
    assert program.recipe == ()


def test_a_replay_skips_what_does_not_hold_and_leaves_what_did_nothing_out_of_the_recipe() -> None:
    before = Planted("before")
    program = identity_program().replace(recipe=(before,))
    kept = Planted("kept", plus=1.0)
    replayed = replay((Refused("refused", plus=5.0), AddsToInput(), kept), program)
    assert output_of(replayed) == [2.0, 3.0]
    assert replayed.recipe == (before, kept)
    assert replay((AddsToInput(), Refused("refused")), program) is program


def test_a_replay_writes_down_what_a_pass_has_measured_in_place_of_the_pass() -> None:
    replayed = replay((AddsToInput(1.0),), identity_program())
    assert output_of(replayed) == [2.0, 3.0]
    assert replayed.recipe == (AddsToInput(2.0),)
