"""fuse-conv-onednn: what is fused, what is left behind the convolution, and that the result is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.aliases import joined
from ampopt.ir.graph import aten
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.transform import replay
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn, FuseConvOnednn
from tests.helpers import BF16, Model, check_keeps_nan, error_of, program_of, targets_of, with_statistics

FUSED = torch.ops.mkldnn._convolution_pointwise.default
ADDED = torch.ops.mkldnn._convolution_pointwise.binary
LIMITS = {"fp32": 5e-6, "amp": 3e-2}

LANES = [
    pytest.param(FP32, id="fp32"),
    pytest.param(
        BF16,
        id="amp",
        marks=pytest.mark.skipif(
            not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bfloat16"
        ),
    ),
]

ACTIVATIONS = [F.hardswish, F.silu, torch.sigmoid, torch.tanh]


def fused(function: Callable[[Any, Tensor], Any], lane: Lane = FP32, /, **members: nn.Module) -> list[object]:
    """The calls after the pass, once the result has been checked here and at another shape."""
    model = with_statistics(Model(function, **members))
    x, other = torch.randn(2, 4, 9, 9), torch.randn(1, 4, 12, 7)
    base = program_of(model, x, lane=lane, on_top_of=(BakeAutocast(), FoldConvBn(), ChannelsLast()))
    result = FuseConvOnednn().apply(base)
    assert error_of(result.program, model, [x]) < LIMITS[lane.name]
    check_keeps_nan(result.program, model, [x], lane)
    elsewhere = program_of(model, other, lane=lane)
    again = replay((BakeAutocast(), FoldConvBn(), ChannelsLast(), FuseConvOnednn()), elsewhere)
    assert error_of(again, model, [other]) < LIMITS[lane.name]
    assert not FuseConvOnednn().apply(result.program).modified
    return targets_of(result.program)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: f.__name__)
def test_an_activation_is_fused(activation: Callable[[Tensor], Tensor], lane: Lane) -> None:
    assert fused(lambda m, x: activation(m.c(x)), lane, c=nn.Conv2d(4, 8, 3, padding=1)) == [FUSED]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("swapped", [True, False])
def test_a_residual_add_is_fused_and_a_relu_stays_behind_it(relu: bool, swapped: bool, lane: Lane) -> None:
    def block(m: Any, x: Tensor) -> Tensor:
        z = torch.tanh(m.s(x))
        y = m.c(z)
        y = z + y if swapped else y + z
        return F.relu(y) if relu else y

    members = {"s": nn.Conv2d(4, 4, 1), "c": nn.Conv2d(4, 4, 3, padding=1)}
    assert fused(block, lane, **members) == [FUSED, ADDED, *([torch.ops.aten.relu.default] if relu else [])]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("bounded", [F.relu, F.hardsigmoid, F.relu6], ids=lambda f: f.__name__)
def test_an_activation_whose_fused_form_swallows_nan_stays_behind(
    bounded: Callable[[Tensor], Tensor], lane: Lane
) -> None:
    targets = fused(lambda m, x: bounded(m.c(x)), lane, c=nn.Conv2d(4, 8, 3, padding=1))
    assert targets[0] is FUSED
    assert len(targets) == 2


@pytest.mark.parametrize("name", ["relu", "hardsigmoid"])
def test_a_fused_form_that_swallows_nan_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, oneDNN has been mended, and the pass may fuse the activation."""
    from ampopt.passes import fuse_conv_onednn

    operator = getattr(torch.ops.aten, name).default
    monkeypatch.setitem(fuse_conv_onednn._UNARY, operator, name)
    with pytest.raises(AssertionError, match="has spoilt in eager"):
        fused(lambda m, x: operator(m.c(x)), c=nn.Conv2d(4, 8, 3))


def test_bfloat16_is_left_alone_where_the_processor_has_no_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    base = program_of(nn.Conv2d(4, 8, 3), torch.randn(1, 4, 8, 8), lane=BF16, on_top_of=(BakeAutocast(),))
    result = FuseConvOnednn().apply(base)
    assert not result.modified
    assert "no bfloat16 instructions" in result.declined[0].reason


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_strides_and_dilations_are_carried(groups: int) -> None:
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=2, dilation=2, groups=groups, bias=False)
    assert fused(lambda m, x: F.silu(m.b(m.c(x))), c=conv, b=nn.BatchNorm2d(8)) == [FUSED]


def test_two_branches_that_meet_are_added_by_one_of_them() -> None:
    members = {"a": nn.Conv2d(4, 8, 1), "b": nn.Conv2d(4, 8, 3, padding=1)}
    targets = fused(lambda m, x: m.a(x) + m.b(x), FP32, **members)
    assert sorted(map(str, targets)) == sorted(map(str, [FUSED, ADDED]))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.relu(y := m.c(x)) + y,
        lambda m, x: m.c(x) + x[:1],
        lambda m, x: m.c(x) + x[0, 0, 0, 0].item(),
        lambda m, x: torch.add(m.c(x), x, alpha=2),
        lambda m, x: F.gelu(m.c(x)),
    ],
    ids=[
        "another reader",
        "an operand that broadcasts",
        "a number",
        "a factor",
        "an activation with parameters",
    ],
)
def test_what_cannot_be_fused_stays_behind_the_packed_convolution(function: Callable[..., Tensor]) -> None:
    targets = fused(function, c=nn.Conv2d(4, 4, 3, padding=1))
    assert targets[0] in (FUSED, torch.ops.aten.slice.Tensor)
    assert len(targets) > 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: F.conv2d(x, m.w * x.mean()), "its weight is computed"),
        (lambda m, x: F.conv2d(x, m.w, x.mean((0, 2, 3)), padding=1) + x, "its bias is computed"),
    ],
    ids=["weight", "bias"],
)
def test_a_computed_weight_is_declined(function: Callable[[Any, Tensor], Tensor], reason: str) -> None:
    model = Model(function, w=torch.randn(4, 4, 3, 3))
    result = FuseConvOnednn().apply(program_of(model, torch.randn(1, 4, 8, 8)))
    assert not result.modified
    assert result.declined[0].reason == reason


def test_other_dtypes_and_inputs_without_a_batch_are_declined() -> None:
    model = nn.Conv2d(4, 4, 3)
    unbatched = FuseConvOnednn().apply(program_of(model, torch.randn(4, 8, 8)))
    wide = FuseConvOnednn().apply(program_of(model.double(), torch.randn(1, 4, 8, 8).double()))
    assert unbatched.declined[0].reason == "its input has no batch"
    assert wide.declined[0].reason == "oneDNN has no float64 convolution"


def test_a_program_under_autocast_is_declined() -> None:
    reason = FuseConvOnednn().why_not(program_of(nn.Conv2d(4, 4, 3), torch.randn(1, 4, 8, 8), lane=BF16))
    assert reason == "it still runs under autocast"


def test_a_wrong_activation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampopt.passes import fuse_conv_onednn

    monkeypatch.setitem(fuse_conv_onednn._UNARY, torch.ops.aten.hardswish.default, "relu")
    with pytest.raises(AssertionError):
        fused(lambda m, x: F.hardswish(m.c(x)), c=nn.Conv2d(4, 8, 3))


@pytest.mark.parametrize("read", [lambda y: y, lambda y: y.contiguous(), lambda y: y * 1])
def test_what_reads_memory_by_strides_finds_it_as_eager_lays_it_out(read: Callable[[Tensor], Tensor]) -> None:
    model = Model(lambda m, x: read(m.c(x)).as_strided((1, 2), (1, 1)), c=nn.Conv2d(4, 4, 1))
    for x in (torch.randn(2, 4, 8, 9), torch.randn(1, 4, 5, 5)):
        program = FuseConvOnednn().apply(program_of(model, x)).program
        with torch.no_grad():
            assert torch.allclose(program.run(x)[0], model(x), atol=1e-5)


def test_results_that_were_copies_are_no_views_of_what_the_kernel_lays_out_otherwise() -> None:
    def heads(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = m.conv(x).permute(0, 2, 3, 1)
        return y.reshape(2, -1, 8), y.reshape(2, 4, -1), m.other(x), m.other(x).tanh()

    model = Model(heads, conv=nn.Conv2d(4, 8, 3), other=nn.Conv2d(4, 8, 3))
    result = FuseConvOnednn().apply(program_of(model, x := torch.randn(2, 4, 6, 6)))
    assert targets_of(result.program).count(aten.clone.default) == 1, "what is fresh anyway is not copied"
    assert joined(result.program.run(x)) == joined(model(x)) == set()
