"""fold-constants: what depends on weights alone is computed once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from ampopt.ir.graph import aten, calls, is_constant
from ampopt.ir.program import Program
from ampopt.ir.transform import Result
from ampopt.passes import FoldConstants, FoldConvBn, RemoveInferenceNoops
from tests.helpers import BF16, Model, check_pass, program_of, spoilt, targets_of, text_of, with_statistics


def _old_style_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.utils.weight_norm(module)


def _computed_from_weights(program: Program) -> list[str]:
    return [
        n.name for n in calls(program.graph) if n.all_input_nodes and all(map(is_constant, n.all_input_nodes))
    ]


def test_a_chain_on_weights_becomes_one_weight() -> None:
    w, v, x = torch.randn(3), torch.randn(3), torch.randn(2, 3)
    model = Model(lambda m, x: x * (m.w * 2 + m.v).relu(), w=w, v=v)
    assert text_of(program_of(model, x)).splitlines() == [
        "mul = aten.mul.Tensor(b_w, 2)",
        "add = aten.add.Tensor(mul, b_v)",
        "relu = aten.relu.default(add)",
        "mul_1 = aten.mul.Tensor(inputs_0, relu)",
    ]
    result = check_pass(FoldConstants(), model, x, rewrites=3, elsewhere=[torch.randn(5, 3)])
    (line,) = text_of(result.program).splitlines()
    assert line.startswith("mul_1 = aten.mul.Tensor(inputs_0, relu")
    (weight,) = result.program.graph.buffers()
    assert torch.equal(weight, (w * 2 + v).relu())


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: _old_style_weight_norm(nn.Conv2d(3, 4, 3)), id="old-style weight_norm"),
        pytest.param(lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), id="weight_norm"),
        pytest.param(lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), id="spectral_norm"),
        pytest.param(lambda: parametrizations.orthogonal(nn.Conv2d(3, 4, 3)), id="orthogonal"),
    ],
)
def test_reparametrized_weights_are_computed_once(layer: Callable[[], nn.Module]) -> None:
    model, x = nn.Sequential(layer(), nn.ReLU()).eval(), torch.randn(1, 3, 6, 6)
    found = len(targets_of(program_of(model, x))) - 2
    assert found > 0
    result = check_pass(FoldConstants(), model, x, rewrites=found, elsewhere=[torch.randn(2, 3, 9, 5)])
    assert targets_of(result.program) == [aten.conv2d.default, aten.relu.default]


def test_a_folded_weight_lets_batch_norm_fold_too() -> None:
    model = with_statistics(
        nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4))
    )
    x = torch.randn(1, 3, 6, 6)
    (declined,) = FoldConvBn().apply(program_of(model, x)).declined
    assert declined.reason == "one of its weights is computed"
    check_pass(FoldConvBn(), model, x, rewrites=1, on_top_of=[FoldConstants()])


def test_a_constant_that_depends_on_the_inputs_shape_is_folded_for_that_shape() -> None:
    model = Model(lambda m, x: x + F.interpolate(m.p, x.shape[-2:]), p=torch.randn(1, 2, 4, 4))
    check_pass(
        FoldConstants(), model, torch.randn(1, 2, 8, 8), rewrites=1, elsewhere=[torch.randn(1, 2, 6, 10)]
    )


def test_it_folds_under_autocast_what_autocast_would_compute() -> None:
    model = Model(lambda m, x: x @ (m.w @ m.v), w=torch.randn(4, 4), v=torch.randn(4, 4))
    result = check_pass(FoldConstants(), model, torch.randn(2, 4), rewrites=1, lane=BF16)
    assert [weight.dtype for weight in result.program.graph.buffers()] == [torch.bfloat16]


def test_it_leaves_what_depends_on_the_input_or_on_nothing() -> None:
    model = Model(lambda m, x: m.linear(x + torch.ones(4)), linear=nn.Linear(4, 4))
    check_pass(FoldConstants(), model, torch.randn(2, 4), rewrites=0)


@pytest.mark.parametrize(
    ("model", "node", "reason"),
    [
        pytest.param(
            Model(lambda m, x: x * m.w.chunk(2)[0], w=torch.randn(6)),
            "chunk",
            "it returns several tensors",
            id="several tensors",
        ),
        pytest.param(
            Model(lambda m, x: (x, m.w * 2), w=torch.randn(3)),
            "mul",
            "it is an output of the model",
            id="output",
        ),
        pytest.param(
            Model(lambda m, x: x + m.w.expand(3, 20_000, 3).sum(1), w=torch.randn(3, 1, 3)),
            "expand",
            "its result is over 4 times as large as its operands",
            id="large expand",
        ),
    ],
)
def test_it_declines(model: nn.Module, node: str, reason: str) -> None:
    result = check_pass(FoldConstants(), model, torch.randn(3, 3), rewrites=0)
    assert [(d.node, d.reason) for d in result.declined] == [(node, reason)]


def test_how_much_larger_a_result_may_be_is_an_option() -> None:
    model = Model(lambda m, x: x + m.w.repeat(1, 20_000)[:, :3], w=torch.randn(3, 1))
    x = torch.randn(3, 3)
    check_pass(FoldConstants(), model, x, rewrites=0)
    result = check_pass(FoldConstants(max_growth=20_000), model, x, rewrites=2)
    assert _computed_from_weights(result.program) == []


def test_an_output_that_is_a_view_of_a_folded_weight_stays_the_callers_own() -> None:
    w, x = torch.randn(2, 2), torch.randn(2)
    model = Model(lambda m, x: (x + 1, (m.w * 2).view(-1)), w=w)
    result = FoldConstants().apply(program_of(model, x))
    result.program.run(x)[1].zero_()
    assert torch.equal(result.program.run(x)[1], (w * 2).view(-1))


class _FoldsAnotherValue(FoldConstants):
    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        if not result.modified:
            return result
        return spoilt(result, lambda module: [weight.add_(1e-6) for weight in module.buffers()])


def test_the_check_catches_a_constant_that_is_one_bit_off() -> None:
    model = Model(lambda m, x: x + m.w * 2, w=torch.ones(3))
    with pytest.raises(AssertionError, match="bits of an output changed"):
        check_pass(_FoldsAnotherValue(), model, torch.ones(2, 3), rewrites=1)


def test_nothing_is_left_to_fold_after_dropout_on_weights_was_removed() -> None:
    model = Model(lambda m, x: x + m.drop(m.w).sqrt(), w=torch.rand(3), drop=nn.Dropout())
    result = check_pass(
        FoldConstants(), model, torch.randn(2, 3), rewrites=1, on_top_of=[RemoveInferenceNoops()]
    )
    assert _computed_from_weights(result.program) == []
