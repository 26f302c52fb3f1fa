"""fuse-conv-act: what is matched, what is declined, and on a GPU cuDNN's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass, Result
from ampopt.passes import BakeAutocast, ChannelsLast, Compile, CudaGraph, FoldConvBn, FuseConvAct
from tests.helpers import (
    BF16,
    FP16,
    Model,
    apply_to_untouched,
    check_keeps_nan,
    check_pass,
    program_of,
    spoilt,
    targets_of,
    text_of,
    with_statistics,
)

Function = Callable[[Any, Tensor], Any]
CONV, TANH, RELU, ADD_RELU = (
    aten.conv2d.default,
    aten.tanh.default,
    aten.cudnn_convolution_relu.default,
    aten.cudnn_convolution_add_relu.default,
)


def _convolution_relu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """What `cudnn_convolution_relu` is defined as."""
    return F.conv2d(x, w, b, stride, padding, dilation, groups).relu()


def _convolution_add_relu(
    x: Tensor,
    w: Tensor,
    z: Tensor,
    alpha: float,
    b: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """What `cudnn_convolution_add_relu` is defined as."""
    return (F.conv2d(x, w, b, stride, padding, dilation, groups) + alpha * z).relu()


class OnCpu(FuseConvAct):
    """The pass with each fused operator replaced by its definition, so that its work runs without a GPU."""

    def why_not(self, program: Program) -> str | None:
        return None

    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        return spoilt(result, _use_definitions) if result.modified else result


def _use_definitions(module: fx.GraphModule) -> None:
    for fused, definition in ((RELU, _convolution_relu), (ADD_RELU, _convolution_add_relu)):
        for node in calls(module, [fused]):
            node.target = definition


def _model(function: Function) -> Model:
    """A model with `a`, `b` of the same shape, `g` grouped, strided `s` and 1x1 `p`, all from 4 channels."""
    return Model(
        function,
        a=nn.Conv2d(4, 4, 3, padding=1),
        b=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        g=nn.Conv2d(4, 4, 3, padding=1, groups=2, dilation=1),
        s=nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1), dilation=2),
        p=nn.Conv2d(4, 4, 1),
    )


FUSED: dict[str, tuple[Function, list[object]]] = {
    "relu": (lambda m, x: m.a(x).relu(), [RELU]),
    "relu without a bias": (lambda m, x: m.b(x).relu(), [RELU]),
    "relu of a grouped convolution": (lambda m, x: m.g(x).relu(), [RELU]),
    "relu of a strided convolution": (lambda m, x: m.s(x).relu(), [RELU]),
    "relu in place": (lambda m, x: F.relu(m.a(x), inplace=True), [RELU]),
    "convolution first": (lambda m, x: (m.a(y := m.p(x).tanh()) + y).relu(), [CONV, TANH, ADD_RELU]),
    "convolution second": (lambda m, x: ((y := m.p(x).tanh()) + m.a(y)).relu(), [CONV, TANH, ADD_RELU]),
    "sum in place": (lambda m, x: m.a(y := m.p(x).tanh()).add_(y).relu(), [CONV, TANH, ADD_RELU]),
    "two convolutions": (lambda m, x: (m.a(x) + m.p(x)).relu(), [CONV, ADD_RELU]),
    "a chain of blocks": (
        lambda m, x: (m.b(m.a(y := m.p(x).relu()).relu()) + y).relu(),
        [RELU, RELU, ADD_RELU],
    ),
    "blocks that add fused results": (
        lambda m, x: (m.b(y := (m.a(x) + m.p(x)).relu()) + y).relu(),
        [CONV, ADD_RELU, ADD_RELU],
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_it_fuses(name: str) -> None:
    function, expected = FUSED[name]
    model, x, elsewhere = _model(function), torch.randn(2, 4, 8, 8), [torch.randn(1, 4, 7, 9)]
    found = sum(target in (RELU, ADD_RELU) for target in expected)
    assert targets_of(FuseConvAct().apply(program_of(model, x)).program) == expected
    check_pass(OnCpu(), model, x, rewrites=found, elsewhere=elsewhere)
    check_pass(OnCpu(), model, x, rewrites=found, on_top_of=[ChannelsLast()])
    check_pass(OnCpu(), model, x, rewrites=found, lane=BF16, on_top_of=[BakeAutocast()])


def test_the_fused_calls_read_as_documented() -> None:
    model = _model(lambda m, x: (m.s(m.a(x).relu()) + m.s(x)).relu())
    assert text_of(FuseConvAct().apply(program_of(model, torch.randn(2, 4, 8, 8))).program).splitlines() == [
        "cudnn_convolution_relu_default = aten.cudnn_convolution_relu.default("
        "inputs_0, p_a_weight, p_a_bias, [1, 1], [1, 1], [1, 1], 1)",
        "conv2d_1 = aten.conv2d.default("
        "cudnn_convolution_relu_default, p_s_weight, p_s_bias, [2, 2], [2, 1], [2, 2])",
        "cudnn_convolution_add_relu_default = aten.cudnn_convolution_add_relu.default("
        "inputs_0, p_s_weight, conv2d_1, 1.0, p_s_bias, [2, 2], [2, 1], [2, 2], 1)",
    ]


def test_it_fuses_after_batch_norm_was_folded() -> None:
    layers = [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()] * 2
    model = with_statistics(nn.Sequential(*layers))
    check_pass(OnCpu(), model, torch.randn(2, 4, 8, 8), rewrites=2, on_top_of=[FoldConvBn()])
    check_pass(OnCpu(), model, torch.randn(2, 4, 8, 8), rewrites=0)


DECLINED: dict[str, tuple[Function, str]] = {
    "another reader of the convolution": (
        lambda m, x: (m_a := m.a(x), m_a.relu()),
        "conv2d has other readers",
    ),
    "another reader of an added convolution": (
        lambda m, x: ((y := m.a(x)) + x).relu() * y,
        "conv2d has other readers",
    ),
    "another reader of the sum": (
        lambda m, x: ((y := m.a(x) + x).relu(), y),
        "add has other readers",
    ),
    "a convolution that is added to itself": (
        lambda m, x: ((y := m.a(x)) + y).relu(),
        "conv2d has other readers",
    ),
    "an operand that broadcasts": (
        lambda m, x: (m.a(x) + x[:1]).relu(),
        "slice_1 differs from conv2d in shape, dtype or memory layout",
    ),
    "a convolution that broadcasts": (
        lambda m, x: (m.a(x[:1]) + x).relu(),
        "inputs_0 differs from conv2d in shape, dtype or memory layout",
    ),
    "a vector for each channel": (
        lambda m, x: (m.a(x) + m.a.bias[:, None, None]).relu(),
        "unsqueeze_1 differs from conv2d in shape, dtype or memory layout",
    ),
    "an operand of another dtype": (
        lambda m, x: (m.a(x) + x.half()).relu(),
        "to differs from conv2d in shape, dtype or memory layout",
    ),
    "an operand in another memory layout": (
        lambda m, x: (m.a(x) + x.permute(0, 1, 3, 2)).relu(),
        "permute differs from conv2d in shape, dtype or memory layout",
    ),
    "a factor": (lambda m, x: torch.add(m.a(x), x, alpha=2).relu(), "add multiplies its operand"),
    "a computed weight": (
        lambda m, x: F.conv2d(x, m.a.weight.sigmoid()).relu(),
        "the weight of conv2d is computed",
    ),
    "a computed bias": (
        lambda m, x: F.conv2d(x, m.a.weight, x.mean((0, 2, 3))).relu(),
        "the bias of conv2d is computed",
    ),
    "a number": (lambda m, x: (m.a(x) + x[0, 0, 0, 0].item()).relu(), "item is a number"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_it_declines(name: str) -> None:
    function, reason = DECLINED[name]
    result = check_pass(OnCpu(), _model(function), torch.randn(2, 4, 8, 8), rewrites=0)
    assert [(declined.node, declined.reason) for declined in result.declined] == [("relu", reason)]


def test_float64_is_declined() -> None:
    x = torch.randn(2, 4, 8, 8).double()
    assert len(check_pass(OnCpu(), _model(lambda m, x: m.a(x).relu()).double(), x, rewrites=0).declined) == 1


def test_an_empty_batch_is_declined() -> None:
    program = program_of(_model(lambda m, x: m.a(x).relu()), torch.randn(0, 4, 8, 8))
    (declined,) = OnCpu().apply(program).declined
    assert declined.reason == "conv2d is empty"


def test_an_input_without_a_batch_is_declined() -> None:
    x = torch.randn(4, 8, 8)
    assert len(check_pass(OnCpu(), _model(lambda m, x: m.a(x).relu()), x, rewrites=0).declined) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.relu(),
        lambda m, x: m.a(x),
        lambda m, x: m.a(x).sigmoid(),
        lambda m, x: F.relu6(m.a(x)),
        lambda m, x: (m.a(x) + 1.0).relu(),
        lambda m, x: (m.a(x) - x).relu(),
        lambda m, x: F.max_pool2d(m.a(x), 2).relu(),
        lambda m, x: (x + x).relu(),
    ],
    ids=[
        "relu alone",
        "no relu",
        "sigmoid",
        "relu6",
        "a number",
        "difference",
        "pooling between",
        "no convolution",
    ],
)
def test_other_patterns_are_left_alone(function: Function) -> None:
    check_pass(OnCpu(), _model(function), torch.randn(2, 4, 8, 8), rewrites=0)


def test_other_convolutions_are_left_alone() -> None:
    for layer, shape in ((nn.Conv1d(4, 4, 3), (2, 4, 8)), (nn.Conv3d(4, 4, 3), (2, 4, 5, 5, 5))):
        check_pass(OnCpu(), nn.Sequential(layer, nn.ReLU()), torch.randn(shape), rewrites=0)
    check_pass(
        OnCpu(), nn.Sequential(nn.ConvTranspose2d(4, 4, 3), nn.ReLU()), torch.randn(2, 4, 5, 5), rewrites=0
    )


def test_a_cpu_and_autocast_are_refused() -> None:
    model, x = _model(lambda m, x: m.a(x).relu()), torch.randn(2, 4, 8, 8)
    program = program_of(model, x, lane=FP16)
    assert FuseConvAct().why_not(program) == "cuDNN's fused operators need CUDA"
    on_cuda = program.replace(device=torch.device("cuda"))
    assert FuseConvAct().why_not(on_cuda) == "it still runs under autocast"
    assert FuseConvAct().why_not(program_of(model, x).replace(device=torch.device("cuda"))) is None


def test_compilers_work_around_the_fused_operators() -> None:
    program = program_of(_model(lambda m, x: m.a(x).relu()), torch.randn(2, 4, 8, 8))
    fused = apply_to_untouched(FuseConvAct(), program).program
    assert Compile().why_not(program) is None
    assert Compile().why_not(fused) is None


class _AddsTwice(OnCpu):
    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        return spoilt(result, _double_alpha) if result.modified else result


def _double_alpha(module: fx.GraphModule) -> None:
    for node in calls(module, [_convolution_add_relu]):
        node.args = (*node.args[:3], 2.0, *node.args[4:])


def test_the_check_catches_an_operand_that_is_added_twice() -> None:
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(
            _AddsTwice(), _model(lambda m, x: (m.a(x) + x).relu()), torch.randn(2, 4, 8, 8), rewrites=1
        )


def _swallowed(program: Program) -> int:
    """How many calls are declined because the kernel that cuDNN chooses makes numbers of NaN."""
    return sum("numbers of NaN" in found.reason for found in FuseConvAct().apply(program).declined)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lane", "before"),
    [
        pytest.param(FP32, [], id="float32"),
        pytest.param(FP32, [ChannelsLast()], id="float32 channels_last"),
        pytest.param(FP16, [BakeAutocast()], id="float16"),
        pytest.param(FP16, [BakeAutocast(), ChannelsLast()], id="float16 channels_last"),
        pytest.param(BF16, [BakeAutocast(), ChannelsLast()], id="bfloat16 channels_last"),
    ],
)
@pytest.mark.parametrize("name", FUSED)
def test_on_a_gpu_fused_kernels_are_right(name: str, lane: Lane, before: list[Pass]) -> None:
    function, expected = FUSED[name]
    model = _model(function).cuda()
    x, elsewhere = torch.randn(2, 4, 8, 8, device="cuda"), [torch.randn(1, 4, 7, 9, device="cuda")]
    unfused = program_of(model, x, lane=lane, on_top_of=before)
    fused_ones = sum(target in (RELU, ADD_RELU) for target in expected)
    here, there = (
        fused_ones - _swallowed(program_of(model, *inputs, lane=lane, on_top_of=before))
        for inputs in ([x], elsewhere)
    )
    if here == 0:  # cuDNN keeps NaN in none of them, and all are declined
        program = program_of(model, x, lane=lane, on_top_of=before)
        assert FuseConvAct().apply(program).program is program
        return
    result = check_pass(
        FuseConvAct(),
        model,
        x,
        rewrites=here,
        lane=lane,
        on_top_of=before,
        elsewhere=elsewhere,
        rewrites_elsewhere=there,
    )
    if here == fused_ones:
        assert targets_of(result.program) == expected
    for fused, plain in zip(result.program.run(x), unfused.run(x), strict=True):
        tolerance = max(8 * torch.finfo(lane.dtype).eps, 1e-5)
        assert torch.allclose(fused, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [3, 16, 64])
@pytest.mark.parametrize("size", [7, 32])
def test_on_a_gpu_a_residual_block_is_right_at_real_widths(channels: int, size: int) -> None:
    model = Model(
        lambda m, x: (m.b(m.a(y := m.p(x)).relu()) + y).relu(),
        a=nn.Conv2d(channels, channels, 3, padding=1),
        b=nn.Conv2d(channels, channels, 3, padding=1),
        p=nn.Conv2d(channels, channels, 1),
    ).cuda()
    x, before = torch.randn(2, channels, size, size, device="cuda"), [BakeAutocast(), ChannelsLast()]
    left = 2 - _swallowed(program_of(model, x, lane=FP16, on_top_of=before))
    program = program_of(model, x, lane=FP16, on_top_of=before)
    assert FuseConvAct().apply(program).rewrites == left
    if left:
        check_pass(FuseConvAct(), model, x, rewrites=left, lane=FP16, on_top_of=before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECLINED)
def test_on_a_gpu_it_declines_the_same(name: str) -> None:
    function, _ = DECLINED[name]
    x = torch.randn(2, 4, 8, 8, device="cuda")
    result = check_pass(FuseConvAct(), _model(function).cuda(), x, rewrites=0)
    assert len(result.declined) == 1


@pytest.mark.gpu
def test_on_a_gpu_the_fused_program_can_be_captured() -> None:
    model = _model(lambda m, x: (m.b(m.a(y := m.p(x)).relu()) + y).relu()).cuda()
    x, before = torch.randn(2, 4, 8, 8, device="cuda"), [BakeAutocast(), ChannelsLast(), FuseConvAct()]
    check_pass(CudaGraph(), model, x, rewrites=1, lane=FP16, on_top_of=before)


@pytest.mark.gpu
@pytest.mark.parametrize("lane", [FP32, FP16])
@pytest.mark.parametrize("residual", [False, True])
def test_cudnns_fused_relu_keeps_nan(lane: Lane, residual: bool) -> None:
    """Of many shapes; a kernel of cuDNN's that makes numbers of NaN is not taken, unless that is wished."""
    for channels, size, kernel in ((16, 12, 3), (64, 56, 3), (64, 56, 1), (256, 14, 1), (4, 8, 3)):
        model = Model(
            lambda m, x: (m.c(y := m.p(x)) + (y if residual else 0)).relu(),
            p=nn.Conv2d(3, channels, 1),
            c=nn.Conv2d(channels, channels, kernel, padding=kernel // 2),
        ).cuda()
        x = torch.randn(1, 3, size, size, device="cuda")
        program = program_of(model, x, lane=lane, on_top_of=[BakeAutocast(), ChannelsLast()])
        result = FuseConvAct().apply(program)
        check_keeps_nan(result.program, model, [x], lane)
        assert FuseConvAct(keeps_nan=False).apply(program).rewrites == result.rewrites + _swallowed(program)
