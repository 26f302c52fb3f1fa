"""Shapes and strides of cuDNN's fused operators, without data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.kernels.cudnn_shapes import know_shapes
from ampopt.passes import BakeAutocast, ChannelsLast, Compile, FuseConvAct
from tests.helpers import FP16, Model, error_of, program_of, targets_of

NCHW, NHWC = torch.contiguous_format, torch.channels_last
GEOMETRY = ([2, 1], [1, 0], [1, 2])


@pytest.fixture(autouse=True)
def _known() -> None:
    know_shapes()


def _operands(taps: int, x_order: torch.memory_format, w_order: torch.memory_format) -> tuple[Tensor, Tensor]:
    x = torch.empty(2, 8, 9, 7, device="meta").to(memory_format=x_order)
    return x, torch.empty(6, 4, taps, taps, device="meta").to(memory_format=w_order)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("taps", "x_order", "w_order", "expected"),
    [
        pytest.param(3, NCHW, NCHW, NCHW, id="channels outermost"),
        pytest.param(3, NHWC, NHWC, NHWC, id="channels innermost"),
        pytest.param(3, NHWC, NCHW, NHWC, id="in the input alone"),
        pytest.param(3, NCHW, NHWC, NHWC, id="in the weight alone"),
        pytest.param(1, NCHW, NCHW, NCHW, id="one tap, which counts as any order"),
        pytest.param(1, NHWC, NCHW, NHWC, id="one tap, input innermost"),
    ],
)
def test_the_result_is_like_a_convolutions(
    add: bool,
    taps: int,
    x_order: torch.memory_format,
    w_order: torch.memory_format,
    expected: torch.memory_format,
) -> None:
    x, w = _operands(taps, x_order, w_order)
    like = F.conv2d(x, w, None, *GEOMETRY, groups=2)
    if add:
        y = torch.cudnn_convolution_add_relu(x, w, torch.empty_like(like), 1.0, None, *GEOMETRY, 2)
    else:
        y = torch.cudnn_convolution_relu(x, w, None, *GEOMETRY, 2)
    assert (y.shape, y.dtype, y.device.type) == (like.shape, like.dtype, "meta")
    assert y.is_contiguous(memory_format=expected)


def test_knowing_twice_changes_nothing() -> None:
    assert know_shapes() is know_shapes()


@pytest.mark.gpu
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("x_order", [NCHW, NHWC])
@pytest.mark.parametrize("w_order", [NCHW, NHWC])
def test_on_a_gpu_cudnn_gives_what_was_foretold(
    taps: int, x_order: torch.memory_format, w_order: torch.memory_format
) -> None:
    x, w = _operands(taps, x_order, w_order)
    real_x, real_w = (torch.randn_like(t, device="cuda", dtype=torch.float16) for t in (x, w))
    x, w, b = x.half(), w.half(), torch.randn(6, device="cuda").half()
    assert (real_x.stride(), real_w.stride()) == (x.stride(), w.stride())
    got = torch.cudnn_convolution_relu(real_x, real_w, b, *GEOMETRY, 2)
    foretold = torch.cudnn_convolution_relu(x, w, b.to("meta"), *GEOMETRY, 2)
    assert (foretold.shape, foretold.dtype, foretold.stride()) == (got.shape, got.dtype, got.stride())


@pytest.mark.gpu
@pytest.mark.parametrize("order", [[], [ChannelsLast()]], ids=["NCHW", "NHWC"])
def test_on_a_gpu_the_fused_program_compiles(order: list[ChannelsLast]) -> None:
    model = Model(
        lambda m, x: (m.b(m.a(x).relu()) + x).relu() * 2,
        a=nn.Conv2d(16, 16, 1),
        b=nn.Conv2d(16, 16, 3, padding=1),
    ).cuda()
    x = torch.randn(2, 16, 8, 8, device="cuda")
    program = program_of(model, x, lane=FP16, on_top_of=[BakeAutocast(), *order, FuseConvAct()])
    assert torch.ops.aten.cudnn_convolution_relu.default in targets_of(program)
    assert Compile().why_not(program) is None
    compiled = Compile().apply(program)
    assert compiled.rewrites == 1
    assert error_of(compiled.program, model, [x]) < 2e-2
