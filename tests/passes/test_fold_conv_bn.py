"""fold-conv-bn: the norm becomes part of every kind of layer, and only where that is right."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from ampopt.ir.graph import arguments, aten, calls, constant
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.transform import Pass
from ampopt.passes import BakeAutocast, FoldConvBn
from tests.helpers import BF16, FP16, Model, check_pass, program_of, targets_of, text_of, with_statistics

CONVOLUTIONS = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SIZES = {1: (9,), 2: (7, 8), 3: (5, 6, 4)}


def _dims(kind: type[nn.Module]) -> int:
    return int(kind.__name__[-2])


class _Branches(nn.Module):
    """Layers side by side on one input, each an output."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(branch(x) for branch in self.branches)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", CONVOLUTIONS, ids=lambda kind: kind.__name__)
def test_every_convolution_takes_the_norm_in(kind: type[nn.Module], groups: int) -> None:
    """In half of all forms: any three of its five options meet in each way."""
    dims = _dims(kind)
    every = product([True, False], [True, False], [1, 2], [1, 2])
    choices = [each for each in every if (sum(each) + groups // 2) % 2 == 0]
    assert len(choices) == 8
    model = with_statistics(
        _Branches(
            *[
                nn.Sequential(
                    kind(4, 8, 3, stride=stride, padding=1, dilation=dilation, groups=groups, bias=bias),
                    NORMS[dims](8, affine=affine),
                )
                for bias, affine, stride, dilation in choices
            ]
        )
    )
    x, elsewhere = torch.randn(2, 4, *SIZES[dims]), torch.randn(1, 4, *[size + 2 for size in SIZES[dims]])
    result = check_pass(FoldConvBn(), model, x, rewrites=len(choices), elsewhere=[elsewhere])
    assert len(targets_of(result.program)) == len(choices), "norms are left"
    assert result.declined == ()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_geometry_folds(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(CONVOLUTIONS))
    dims, transposed = _dims(kind), "Transpose" in kind.__name__
    groups = data.draw(st.integers(1, 4))
    width = [groups * data.draw(st.integers(1, 3)) for _ in range(2)]
    kernel = tuple(data.draw(st.integers(1, 3)) for _ in range(dims))
    stride = tuple(data.draw(st.integers(1, 3)) for _ in range(dims))
    dilation = tuple(data.draw(st.integers(1, 2)) for _ in range(dims))
    padding = tuple(data.draw(st.integers(0, size - 1)) for size in kernel)
    extra = {}
    if transposed:
        extra["output_padding"] = tuple(
            data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
    conv = kind(
        *width,
        kernel,
        stride,
        padding,
        dilation=dilation,
        groups=groups,
        bias=data.draw(st.booleans()),
        **extra,
    )
    norm = NORMS[dims](
        width[1], affine=data.draw(st.booleans()), eps=data.draw(st.sampled_from([1e-5, 1e-3, 1.0]))
    )
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    x = torch.randn(
        data.draw(st.integers(1, 2)), width[0], *[data.draw(st.integers(5, 8)) for _ in range(dims)]
    )
    check_pass(FoldConvBn(), with_statistics(nn.Sequential(conv, norm)), x, rewrites=1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_linear_features_take_the_norm_in(bias: bool, affine: bool) -> None:
    model = with_statistics(nn.Sequential(nn.Linear(5, 6, bias=bias), nn.BatchNorm1d(6, affine=affine)))
    check_pass(FoldConvBn(), model, torch.randn(3, 5), rewrites=1, elsewhere=[torch.randn(8, 5)])


def test_the_graph_keeps_the_layer_with_new_weights() -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()))
    result = check_pass(FoldConvBn(), model, torch.randn(1, 2, 5, 5), rewrites=1)
    conv, relu = text_of(result.program).splitlines()
    assert conv.startswith("conv2d = aten.conv2d.default(input_1, batch_norm_weight, batch_norm_bias, [1, 1]")
    assert relu == "relu = aten.relu.default(conv2d)"


@pytest.mark.parametrize(
    ("lane", "baked"), [(FP32, []), (BF16, [BakeAutocast()])], ids=["fp32", "baked bfloat16"]
)
def test_the_new_weights_are_the_formula_in_float64_rounded_once(lane: Lane, baked: list[Pass]) -> None:
    conv, norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
    with_statistics(norm)
    assert norm.running_var is not None
    assert norm.running_mean is not None
    assert conv.bias is not None
    model, x = nn.Sequential(conv, norm).eval(), torch.randn(1, 2, 5, 5)
    result = check_pass(FoldConvBn(), model, x, rewrites=1, lane=lane, on_top_of=baked)
    (node,) = calls(result.program.graph)
    scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
    weight = conv.weight.double() * scale.reshape(-1, 1, 1, 1)
    bias = norm.bias.double() - norm.running_mean.double() * scale + conv.bias.double() * scale
    for name, exact in (("weight", weight), ("bias", bias)):
        stored = constant(result.program.graph, arguments(node)[name])
        assert stored is not None
        assert torch.equal(stored, exact.to(lane.dtype))


def test_a_layer_used_twice_is_folded_once_for_each_norm() -> None:
    model = with_statistics(
        Model(
            lambda m, x: m.second(m.conv(m.first(m.conv(x)))),
            conv=nn.Conv2d(4, 4, 3, padding=1),
            first=nn.BatchNorm2d(4),
            second=nn.BatchNorm2d(4),
        )
    )
    check_pass(FoldConvBn(), model, torch.randn(2, 4, 6, 6), rewrites=2)


def test_a_norm_used_twice_is_folded_into_both_layers() -> None:
    model = with_statistics(
        Model(
            lambda m, x: m.norm(m.b(m.norm(m.a(x)))),
            a=nn.Conv2d(3, 4, 1),
            b=nn.Conv2d(4, 4, 3),
            norm=nn.BatchNorm2d(4),
        )
    )
    check_pass(FoldConvBn(), model, torch.randn(2, 3, 6, 6), rewrites=2)


def test_a_weight_shared_with_a_layer_that_has_no_norm_stays_there() -> None:
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    second.weight, second.bias = first.weight, first.bias
    model = with_statistics(
        Model(
            lambda m, x: (m.norm(m.first(x)), m.second(x)), first=first, second=second, norm=nn.BatchNorm2d(4)
        )
    )
    check_pass(FoldConvBn(), model, torch.randn(2, 3, 6, 6), rewrites=1)


def test_a_chain_of_layers_folds_one_by_one() -> None:
    layers = [
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.BatchNorm2d(6),
    ]
    head = [nn.Flatten(), nn.Linear(24, 5), nn.BatchNorm1d(5)]
    check_pass(
        FoldConvBn(), with_statistics(nn.Sequential(*layers, *head)), torch.randn(2, 3, 6, 6), rewrites=3
    )


def test_it_folds_under_autocast_in_full_precision() -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    result = check_pass(FoldConvBn(), model, torch.randn(2, 3, 8, 8), rewrites=1, lane=BF16)
    assert {weight.dtype for weight in result.program.graph.buffers()} == {torch.float32}


def test_a_norm_that_a_policy_keeps_in_full_precision_is_left_alone() -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    baked = [BakeAutocast(policy="O2")]
    check_pass(FoldConvBn(), model, torch.randn(2, 3, 8, 8), rewrites=0, lane=BF16, on_top_of=baked)


def test_it_folds_where_capture_had_to_functionalize_the_graph() -> None:
    def add_to_a_view(m: Any, x: Tensor) -> Any:
        y = x * 1
        y[:, 0] += 1
        return m.up_norm(m.up(m.norm(m.conv(y))))

    model = with_statistics(
        Model(
            add_to_a_view,
            conv=nn.Conv2d(4, 6, 3, groups=2),
            norm=nn.BatchNorm2d(6),
            up=nn.ConvTranspose2d(6, 4, 2, 2, groups=2),
            up_norm=nn.BatchNorm2d(4),
        )
    )
    assert aten.select_scatter.default in targets_of(program_of(model, torch.randn(2, 4, 6, 6)))
    check_pass(FoldConvBn(), model, torch.randn(2, 4, 6, 6), rewrites=2)


def test_padding_that_is_named_folds_too() -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4)))
    check_pass(FoldConvBn(), model, torch.randn(2, 3, 6, 6), rewrites=1)


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        pytest.param(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
            (2, 3, 6, 6),
            "it normalizes with the statistics of the batch",
            id="batch statistics",
        ),
        pytest.param(
            Model(
                lambda m, x: (m.norm(y := m.conv(x)), y.relu()),
                conv=nn.Conv2d(3, 4, 3),
                norm=nn.BatchNorm2d(4),
            ),
            (2, 3, 6, 6),
            "conv2d has other readers, which need it as it is",
            id="another reader",
        ),
        pytest.param(
            Model(lambda m, x: (m.norm(y := m.conv(x)), y), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4)),
            (2, 3, 6, 6),
            "conv2d has other readers, which need it as it is",
            id="also an output",
        ),
        pytest.param(
            Model(
                lambda m, x: m.norm(F.conv2d(x, m.w.sigmoid())),
                w=torch.randn(4, 3, 3, 3),
                norm=nn.BatchNorm2d(4),
            ),
            (2, 3, 6, 6),
            "one of its weights is computed",
            id="computed weight of the layer",
        ),
        pytest.param(
            Model(
                lambda m, x: F.batch_norm(m.conv(x), m.mean, m.mean.exp()),
                conv=nn.Conv2d(3, 4, 3),
                mean=torch.randn(4),
            ),
            (2, 3, 6, 6),
            "one of its weights is computed",
            id="computed statistics",
        ),
        pytest.param(
            nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)),
            (2, 4, 5),
            "linear has 3 dimensions: dimension 1 is not its output channel",
            id="linear on 3 dimensions",
        ),
        pytest.param(
            Model(lambda m, x: m.norm(F.linear(x, m.w)), w=torch.randn(5), norm=nn.BatchNorm1d(4)),
            (2, 4, 5),
            "the weight of linear is a vector: it has one feature, which is no dimension",
            id="linear of a vector",
        ),
        pytest.param(
            nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm1d(4)),
            (3, 4, 5),
            "conv2d has 3 dimensions: dimension 1 is not its output channel",
            id="convolution without a batch",
        ),
    ],
)
def test_it_declines(model: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    result = check_pass(FoldConvBn(), with_statistics(model), torch.randn(shape), rewrites=0)
    assert [(declined.node, declined.reason) for declined in result.declined] == [("batch_norm", reason)]


def _normalized_by_instance(m: Any, x: Tensor) -> Tensor:
    """By copies of running statistics: PyTorch 2.10 writes to them in each call, so that they are state."""
    return F.instance_norm(m.conv(x), m.mean.clone(), m.var.clone(), use_input_stats=False)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
        Model(_normalized_by_instance, conv=nn.Conv2d(3, 4, 3), mean=torch.randn(4), var=torch.rand(4) + 1),
    ],
    ids=["norm first", "activation between", "group norm", "instance norm"],
)
def test_a_norm_that_does_not_follow_a_layer_is_left_alone(model: nn.Module) -> None:
    assert (
        check_pass(FoldConvBn(), with_statistics(model), torch.randn(2, 3, 6, 6), rewrites=0).declined == ()
    )


def _without_eps(module: fx.GraphModule, norm: fx.Node) -> tuple[Tensor, Tensor]:
    names = ("running_mean", "running_var", "weight", "bias")
    mean, variance, gamma, beta = (getattr(module, arguments(norm)[name].target).double() for name in names)
    scale = gamma * variance.rsqrt()
    return scale, beta - mean * scale


def test_the_check_catches_a_scale_without_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.passes.fold_conv_bn._scale_and_shift", _without_eps)
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(FoldConvBn(), model, torch.randn(2, 3, 6, 6), rewrites=1)


def _as_if_ungrouped(scale: Tensor, weight: Tensor, groups: int | None) -> Tensor:
    """What `torch.nn.utils.fusion` did to transposed convolutions with groups, made to fit the shape."""
    kernel = (1,) * (weight.dim() - 2)
    if groups is None:
        return scale.reshape(-1, 1, *kernel)
    return scale[: weight.shape[1]].reshape(1, -1, *kernel)


def test_the_check_catches_groups_of_a_transposed_convolution_that_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ampopt.passes.fold_conv_bn._along_output_channel", _as_if_ungrouped)
    x = torch.randn(2, 4, 5, 5)
    dense, grouped = (
        with_statistics(nn.Sequential(nn.ConvTranspose2d(4, 8, 3, groups=groups), nn.BatchNorm2d(8)))
        for groups in (1, 2)
    )
    check_pass(FoldConvBn(), dense, x, rewrites=1)
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(FoldConvBn(), grouped, x, rewrites=1)


def test_weights_that_the_dtype_cannot_hold_when_they_are_folded_are_left_alone() -> None:
    """A dead channel's variance is 0: s is 1e6 there, and autocast normalizes in FP32."""
    conv, norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, eps=1e-12)
    assert norm.running_var is not None
    norm.running_var.data[0] = 0.0
    model, x = nn.Sequential(conv, norm, nn.Sigmoid()).eval(), torch.randn(1, 4, 8, 8)
    program = program_of(model, x, lane=FP16, on_top_of=[BakeAutocast()])
    result = FoldConvBn().apply(program)
    assert result.rewrites == 0
    assert "cannot hold the folded weights" in result.declined[0].reason
    assert FoldConvBn().apply(program_of(model, x)).rewrites == 1


def test_a_norm_that_divides_by_zero_is_left_alone() -> None:
    """Infinite weights would make NaN of sums that eager, on a GPU, makes infinite."""

    def normalized(m: Any, x: Tensor) -> Tensor:  # nn.BatchNorm2d of PyTorch 2.10 takes no eps of 0
        return torch.batch_norm(m.conv(x), None, None, m.mean, m.var, False, 0.0, 0.0, False)

    model = Model(normalized, conv=nn.Conv2d(4, 4, 3), mean=torch.zeros(4), var=torch.arange(4.0))
    result = FoldConvBn().apply(program_of(model, torch.randn(1, 4, 8, 8)))
    assert result.rewrites == 0
    assert "cannot hold the folded weights" in result.declined[0].reason
