"""fold-constants: what depends on no input is computed once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ampopt.engines.executable import executable
from ampopt.ir.graph import aten, calls, is_constant
from ampopt.ir.program import Program
from ampopt.ir.transform import Result
from ampopt.passes import CudaGraph, FoldConstants, FoldConvBn, RemoveInferenceNoops
from tests.helpers import BF16, Model, check_pass, program_of, spoilt, targets_of, text_of, with_statistics


def _old_style_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.utils.weight_norm(module)


def _computed_from_weights(program: Program) -> list[str]:
    return [
        n.name for n in calls(program.graph) if n.all_input_nodes and all(map(is_constant, n.all_input_nodes))
    ]


def _of_no_input(program: Program) -> list[str]:
    """The calls that do not depend on the inputs."""
    names, dependent = list[str](), {node for node in program.graph.graph.nodes if node.op == "placeholder"}
    for node in calls(program.graph):
        if dependent.isdisjoint(node.all_input_nodes):
            names.append(node.name)
        else:
            dependent.add(node)
    return names


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


def positions(x: Tensor) -> Tensor:
    """A sine embedding of pixels, as vision transformers make it anew in every call."""
    rows = (~torch.zeros(x.shape[-2:]).to(device=x.device, dtype=torch.bool)).cumsum(0, dtype=torch.float32)
    steps = torch.arange(6, dtype=torch.float32, device=x.device)
    angles = rows[:, :, None] / 100 ** (torch.div(steps, 2, rounding_mode="floor") / 3)
    waves = torch.stack([angles[..., 0::2].sin(), angles[..., 1::2].cos()], dim=3).flatten(2)
    return waves.permute(2, 0, 1)


def grid(x: Tensor) -> Tensor:
    """Coordinates between -1 and 1, as samplers and detectors make them."""
    height, width = x.shape[-2:]
    ys, xs = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    return torch.stack((xs, ys), -1).to(x).expand(x.shape[0], -1, -1, -1)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda m, x: x + positions(x), id="sine embedding"),
        pytest.param(lambda m, x: F.grid_sample(x, grid(x), align_corners=False), id="grid"),
        pytest.param(lambda m, x: m.w.chunk(2)[1] + x, id="a part of a weight"),
        pytest.param(
            lambda m, x: x + m.w.expand(12, 50_000, 6, 6).sum(1)[:6], id="less than its intermediates"
        ),
        pytest.param(lambda m, x: x.masked_fill(torch.ones(6, 6).tril() == 0, 0.5), id="causal mask"),
        pytest.param(lambda m, x: x + torch.full((6,), 0.1), id="numbers"),
    ],
)
def test_what_is_made_of_nothing_or_of_weights_is_in_no_call(function: Callable[..., Tensor]) -> None:
    model, x = Model(function, w=torch.randn(12, 1, 6, 6)), torch.randn(6, 6, 6, 6)
    program = program_of(model, x)
    found = FoldConstants().apply(program).rewrites
    result = check_pass(FoldConstants(), model, x, rewrites=found)
    assert _of_no_input(program) != []
    assert _of_no_input(result.program) == []


@pytest.mark.gpu
@pytest.mark.parametrize("embed", [positions, lambda x: F.grid_sample(x, grid(x), align_corners=False)])
def test_on_a_gpu_what_the_model_makes_on_the_cpu_is_no_obstacle_to_a_graph(
    embed: Callable[[Tensor], Tensor],
) -> None:
    model, x = Model(lambda m, x: (x + embed(x)).relu()).cuda(), torch.randn(2, 6, 12, 10, device="cuda")
    program = program_of(model, x, on_top_of=[FoldConstants(), CudaGraph()])
    assert torch.equal(executable(program)(x)[0], model(x))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda m, x: x + torch.empty(4).fill_(2), id="uninitialized memory"),
        pytest.param(lambda m, x: x + torch.zeros(1_100_000)[x.long()], id="more than 4 MiB"),
        pytest.param(lambda m, x: m.linear(x), id="the input"),
    ],
)
def test_it_leaves(function: Callable[..., Tensor]) -> None:
    program = program_of(Model(function, linear=nn.Linear(4, 4)), torch.rand(2, 4))
    assert FoldConstants().apply(program).rewrites == 0


@pytest.mark.parametrize(
    ("model", "node", "reason"),
    [
        pytest.param(
            Model(lambda m, x: (x, m.w * 2), w=torch.randn(3)),
            "mul",
            "it is an output of the model",
            id="output",
        ),
        pytest.param(
            Model(lambda m, x: (x[:, None] + m.w.expand(3, 20_000, 3)).sum(1), w=torch.randn(3, 1, 3)),
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
    model = Model(lambda m, x: (x + m.w.repeat(1, 20_000)).sum(1), w=torch.randn(3, 1))
    x = torch.randn(3, 1)
    check_pass(FoldConstants(most_bytes=200_000), model, x, rewrites=0)
    for step in (FoldConstants(), FoldConstants(max_growth=20_000, most_bytes=200_000)):
        result = check_pass(step, model, x, rewrites=1)
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
