"""The check that the tests of the passes rely on catches what it says it catches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, fx, nn

from ampopt.ir.graph import aten, calls, constant, copy_of, finish
from ampopt.ir.origin import Origin, carry_on
from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Numerics, Pass, Result
from tests.helpers import Model, apply_to_untouched, check_pass, program_of


class _Planted(Pass):
    """A pass with one mistake; a subclass says which."""

    numerics = Numerics.BITWISE
    family = Family.REWRITE
    portable = True

    def apply(self, program: Program) -> Result:
        module = copy_of(program.graph)
        self.edit(module)
        return Result(program.with_graph(finish(module)), 1)

    def edit(self, module: fx.GraphModule) -> None:
        raise NotImplementedError


class _WritesIntoAWeight(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        for _, weight in module.named_buffers():
            weight.mul_(2)


class _EditsTheInputProgram(_Planted):
    def apply(self, program: Program) -> Result:
        next(calls(program.graph, [aten.relu.default])).target = aten.sigmoid.default
        program.graph.recompile()
        return Result(program, 0)


class _CountsWhatItDoesNotDo(_Planted):
    def apply(self, program: Program) -> Result:
        return Result(program, 1)


class _DoesNotCountWhatItDoes(_Planted):
    def apply(self, program: Program) -> Result:
        return Result(program.with_graph(copy_of(program.graph)), 0)


class _FindsItsOwnWork(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        pass


class _MovesBits(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        next(calls(module, [aten.relu.default])).target = aten.abs.default


class _MovesTooFar(_MovesBits):
    numerics = Numerics.REASSOCIATED


class _ChangesTheShape(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        node = next(calls(module, [aten.relu.default]))
        node.target, node.args = aten.unsqueeze.default, (node.args[0], 0)


class _GivesTheInputBack(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        clone = next(calls(module, [aten.clone.default]))
        clone.replace_all_uses_with(clone.all_input_nodes[0])


class _GivesAWeightAway(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        clone = list(calls(module, [aten.clone.default]))[-1]
        assert constant(module, clone.args[0]) is not None
        clone.replace_all_uses_with(clone.all_input_nodes[0])


class _SaysNotWhereACallComesFrom(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        node = next(calls(module, [aten.relu.default]))
        with module.graph.inserting_before(node):
            new = module.graph.call_function(aten.relu.default, node.args)
        node.replace_all_uses_with(new)


class _SaysNotWhereAWeightComesFrom(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        linear = next(calls(module, [aten.linear.default]))
        module.register_buffer("zero", torch.zeros(4))
        with module.graph.inserting_before(linear):
            linear.args = (*linear.args[:2], module.graph.get_attr("zero"))


class _InventsAnOrigin(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        next(calls(module, [aten.relu.default])).meta["origins"] = (Origin("elsewhere", "a.py:1"),)


class _LosesAnOrigin(_Planted):
    def edit(self, module: fx.GraphModule) -> None:
        relu = next(calls(module, [aten.relu.default]))
        for node in (*calls(module), *module.graph.find_nodes(op="get_attr")):
            carry_on(node, relu)


class _KeepsADeadWeight(_Planted):
    def apply(self, program: Program) -> Result:
        module = copy_of(program.graph)
        module.register_buffer("left_over", torch.zeros(1))
        return Result(program.with_graph(module), 1)


class _ForgetsToCompile(_Planted):
    def apply(self, program: Program) -> Result:
        module = copy_of(program.graph)
        next(calls(module, [aten.relu.default])).target = aten.abs.default
        return Result(program.with_graph(module), 1)


@dataclasses.dataclass(frozen=True)
class _KnowsTheShape(_Planted):
    """Right for the rows that it was made with, wrong for all others."""

    def apply(self, program: Program) -> Result:
        module = copy_of(program.graph)
        node = next(calls(module, [aten.relu.default]), None)
        if node is None:
            return Result(program, 0)
        node.target, node.args = (
            aten.clamp.default,
            (node.args[0], 0.0 if len(program.examples[0]) == 2 else 1.0),
        )
        return Result(program.with_graph(finish(module)), 1)


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.relu(self.linear(x)), x.clone(), self.linear.weight


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (_WritesIntoAWeight(), "weight .* of the input program changed"),
        (_EditsTheInputProgram(), "the graph of the input program changed"),
        (_CountsWhatItDoesNotDo(), "the count does not say"),
        (_DoesNotCountWhatItDoes(), "the count does not say"),
        (_FindsItsOwnWork(), "not idempotent"),
        (_MovesBits(), "bits of an output changed"),
        (_MovesTooFar(), "the error is"),
        (_ChangesTheShape(), "another kind of tensor"),
        (_GivesTheInputBack(), "an output shares memory with an input"),
        (_GivesAWeightAway(), "an output shares memory with the program"),
        (_KeepsADeadWeight(), "weights that nothing reads"),
        (_ForgetsToCompile(), "edited after it was compiled"),
        (_SaysNotWhereACallComesFrom(), "relu_default has no origin"),
        (_SaysNotWhereAWeightComesFrom(), "zero has no origin"),
        (_InventsAnOrigin(), r"relu comes from where nothing came from: \['elsewhere, a.py:1'\]"),
        (_LosesAnOrigin(), r"nothing comes from \['linear, test_check_pass.py:\d+'\] any more"),
    ],
    ids=lambda value: type(value).__name__.strip("_") if isinstance(value, Pass) else "",
)
def test_a_planted_mistake_is_caught(mistake: Pass, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_pass(mistake, _Small(), torch.randn(2, 4), rewrites=1)


@pytest.mark.parametrize(
    "weight", [torch.full((4, 4), float("nan")), torch.rand(4, 1).expand(4, 4)], ids=["NaN", "expanded"]
)
def test_a_weight_of_any_kind_is_seen_to_stay_as_it_is(weight: Tensor) -> None:
    model = Model(lambda m, x: torch.relu(m.linear(x)) + m.odd, linear=nn.Linear(4, 4))
    model.register_buffer("odd", weight)
    program = program_of(model, torch.randn(4, 4))
    assert apply_to_untouched(_KnowsTheShape(), program).rewrites == 1
    with pytest.raises(AssertionError, match=r"weight .* of the input program changed"):
        apply_to_untouched(_WritesIntoAWeight(), program)


def test_a_wrong_count_is_caught() -> None:
    with pytest.raises(AssertionError, match="1 rewrites were counted instead of 2"):
        check_pass(_FindsItsOwnWork(), _Small(), torch.randn(2, 4), rewrites=2)


def test_a_rewrite_that_only_holds_for_the_captured_shape_is_caught() -> None:
    check_pass(_KnowsTheShape(), _Small(), torch.randn(2, 4), rewrites=1)
    with pytest.raises(AssertionError, match="bits of an output changed"):
        check_pass(_KnowsTheShape(), _Small(), torch.randn(2, 4), rewrites=1, elsewhere=[torch.randn(3, 4)])
