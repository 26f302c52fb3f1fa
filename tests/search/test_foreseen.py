"""Results of passes ahead of their trial: taken where shapes come true, made anew where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from ampopt.ir import shapes
from ampopt.ir.graph import aten, calls
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Result
from ampopt.passes import FoldConvBn, RemoveInferenceNoops
from ampopt.search.foreseen import Foreseen
from tests.helpers import Model, program_of
from tests.support.planted import Planted


class ByStrides(Planted):
    """Rewrites, or not, by the strides of the first call's result."""

    def apply(self, program: Program) -> Result:
        node = next(calls(record_shapes(program)))
        rewrites = int(node.meta["tensor_meta"].stride[-1] == 1)
        return Result(program.replace() if rewrites else program, rewrites)


def told_otherwise(monkeypatch: pytest.MonkeyPatch, *strides: int) -> None:
    """Let fake tensors tell these strides of the first call's result."""
    before = shapes._told

    def told(program: Program) -> fx.GraphModule | None:
        module = before(program)
        assert module is not None
        node = next(calls(module))
        node.meta["tensor_meta"] = node.meta["tensor_meta"]._replace(stride=strides)
        return module

    monkeypatch.setattr("ampopt.ir.shapes._told", told)


def given_up_of(step: Any, program: Program) -> tuple[list[str], Program, Result | None]:
    given_up: list[str] = []
    foreseen = Foreseen(lambda: given_up.append("it"))
    made = foreseen.replay((step,), program)
    found = foreseen.take(step, program)
    assert foreseen.take(step, program) is None
    return given_up, made, found


def doubled() -> Program:
    def model(_: Any, x: Tensor) -> Tensor:
        return x.exp() * 2

    return program_of(Model(model), torch.ones(2, 1, 4))


def test_results_are_taken_once() -> None:
    given_up, made, found = given_up_of(Planted("one"), doubled())
    assert found is not None
    assert found.program.graph is made.graph
    assert not given_up


@pytest.mark.parametrize(
    ("strides", "is_given_up"), [((4, 4, 1), False), ((4, 1, 1), False), ((1, 8, 2), True), ((4, 1, 2), True)]
)
def test_strides_of_a_size_of_1_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, strides: tuple[int, ...], is_given_up: bool
) -> None:
    told_otherwise(monkeypatch, *strides)
    given_up, _, found = given_up_of(ByStrides("one"), doubled())
    assert found is not None
    assert found.modified  # as the real strides have it
    assert given_up == (["it"] if is_given_up else [])


def test_what_comes_to_the_same_with_other_strides_stays_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(Planted):
        def apply(self, program: Program) -> Result:
            record_shapes(program)
            return super().apply(program)

    told_otherwise(monkeypatch, 1, 8, 2)
    given_up, made, found = given_up_of(Reads("one", factor=2.0), doubled())
    assert not given_up
    assert found is not None
    assert found.program.graph is not made.graph


def test_a_pass_that_fails_on_the_real_shapes_gives_up_and_is_told_by_the_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refuses(Planted):
        def apply(self, program: Program) -> Result:
            if next(calls(record_shapes(program))).meta["tensor_meta"].stride[-1] == 1:
                raise RuntimeError("planted")
            return super().apply(program)

    told_otherwise(monkeypatch, 1, 8, 2)
    given_up, _, found = given_up_of(Refuses("one"), doubled())
    assert given_up == ["it"]
    assert found is None


def test_what_was_made_before_a_failure_is_not_taken() -> None:
    foreseen, program = Foreseen(), doubled()
    first, second = Planted("one", factor=2.0), Planted("two", error=RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        foreseen.replay((first, second), program)
    assert foreseen.take(first, program) is None


class Squeezed(nn.Module):
    """A squeeze and excitation block: its images of one pixel have other strides on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu()
        gate: Tensor = self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return x * gate


def test_squeeze_and_excitation_comes_true() -> None:
    x = torch.randn(1, 8, 6, 6).to(memory_format=torch.channels_last)
    program = program_of(Squeezed().eval().to(memory_format=torch.channels_last), x)
    given_up: list[str] = []
    foreseen = Foreseen(lambda: given_up.append("it"))
    steps = RemoveInferenceNoops(), FoldConvBn()
    made = foreseen.replay(steps, program)
    assert not any(node.target is aten.batch_norm.default for node in calls(made.graph))
    found = foreseen.take(made.recipe[0], program)
    assert found is not None
    assert not given_up
