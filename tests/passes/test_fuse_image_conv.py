"""fuse-image-conv: what is matched and what is declined, computed by the definition of its operator."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32
from ampopt.ir.program import Border, Program
from ampopt.ir.transform import Declined, Pass, Result
from ampopt.kernels.image_chains import ImageChain
from ampopt.kernels.image_conv import image_conv, reference
from ampopt.passes import AllowTf32, BakeAutocast, ChannelsLast, FuseConvTriton, FuseImageConv
from tests.helpers import (
    FP16,
    Model,
    apply_to_untouched,
    check_graph,
    check_pass,
    program_of,
    spoilt,
    targets_of,
    text_of,
)

TILE = "image:32:32:32:1:2:1:ieee"


class OnCpu(FuseImageConv):
    """The pass with one tile chosen everywhere, and the operator replaced by its definition."""

    def why_not(self, program: Program) -> str | None:
        return None

    def _choose(
        self,
        module: fx.GraphModule,
        program: Program,
        found: dict[int, list[ImageChain]],
        declined: list[Declined],
    ) -> dict[str, str]:
        return {chain.conv.name: TILE for chains in found.values() for chain in chains}

    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        if not result.modified:
            return result
        return dataclasses.replace(spoilt(result, _use_definition), replay=result.replay)


def _definition(*arguments: Any) -> Tensor:
    return reference(*arguments[:-1])  # the last is the tile


def _use_definition(module: fx.GraphModule) -> None:
    for node in calls(module, [image_conv()]):
        node.target = _definition


def stem(function: Any) -> Model:
    """`a` and `b` read an image of three channels, `c` what they make of it."""
    return Model(
        function,
        a=nn.Conv2d(3, 8, 3, stride=2, padding=1),
        b=nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        c=nn.Conv2d(8, 8, 3),
        g=nn.Conv2d(3, 6, 3, groups=3),
        w=nn.Conv2d(3, 6, 5),
    )


IMAGE = torch.randn(2, 3, 12, 10)


@pytest.mark.parametrize("above", [[], [ChannelsLast()]], ids=["as given", "channels-last"])
@pytest.mark.parametrize(
    ("function", "rewrites"),
    [
        pytest.param(lambda m, x: m.c(m.a(x).relu()), 1, id="stem"),
        pytest.param(lambda m, x: m.a(x), 1, id="given back"),
        pytest.param(lambda m, x: F.hardswish(m.b(x)), 1, id="activation given back"),
        pytest.param(lambda m, x: [y := m.a(x), y.relu()], 1, id="read twice"),
        pytest.param(lambda m, x: m.a(x) + m.b(x).relu(), 2, id="two of an image"),
    ],
)
def test_it_fuses(function: Any, rewrites: int, above: list[Pass]) -> None:
    result = check_pass(
        OnCpu(),
        stem(function),
        IMAGE,
        rewrites=rewrites,
        on_top_of=above,
        elsewhere=[torch.randn(1, 3, 9, 9)],
        limit=1e-5,
    )
    assert isinstance(result.replay, OnCpu)
    assert len(result.replay.choices or ()) == rewrites
    assert result.program.entry == (Border(torch.float32),)


@pytest.mark.parametrize("above", [[BakeAutocast()], [BakeAutocast(), ChannelsLast()]])
def test_in_lower_precision_neither_the_image_nor_a_result_is_converted(above: list[Pass]) -> None:
    model = stem(lambda m, x: m.a(x).relu())
    result = check_pass(OnCpu(), model, IMAGE, rewrites=1, on_top_of=above, lane=FP16, limit=2e-3)
    assert result.program.entry == (Border(torch.float32),)
    assert targets_of(result.program) == [_definition]
    (output,) = result.program.graph(IMAGE)
    assert output.dtype is torch.float32
    assert output.is_contiguous()


def test_an_image_with_its_channels_innermost_is_read_so() -> None:
    x = IMAGE.contiguous(memory_format=torch.channels_last)
    result = check_pass(OnCpu(), stem(lambda m, x: m.c(m.a(x))), x, rewrites=1, limit=1e-5)
    assert result.program.entry == (Border(torch.float32, torch.channels_last),)


def test_the_fused_call_reads_as_documented() -> None:
    program = program_of(stem(lambda m, x: m.c(m.a(x).relu())), IMAGE, on_top_of=[ChannelsLast()])
    fused = FuseImageConv(choices=(("conv2d", TILE),)).apply(program)
    assert text_of(fused.program).splitlines()[0] == (
        "image_conv_default = ampopt.image_conv.default(inputs_0, conv2d_weight_1, p_a_bias, "
        f"[2, 2, 1, 1, 1, 1], relu, torch.float32, True, {TILE})"
    )
    check_graph(fused.program)


def test_what_another_pass_has_fused_is_fused_on() -> None:
    tile = "dense:16:32:32:1:2:4:ieee"
    program = program_of(stem(lambda m, x: m.c(m.a(x).relu())), IMAGE, on_top_of=[ChannelsLast()])
    packed = FuseConvTriton(choices=(("conv2d", tile), ("conv2d_1", tile))).apply(program).program
    fused = OnCpu().apply(packed)
    assert fused.rewrites == 1
    (call,) = calls(fused.program.graph, [_definition])
    assert call.args[4] == "relu"


DECLINED: dict[str, tuple[Any, Tensor, str]] = {
    "another reader": (
        lambda m, x: m.a(x).mean() + x,
        IMAGE,
        "it reads the image, and is no convolution",
    ),
    "groups": (lambda m, x: m.g(x), IMAGE, "it has groups"),
    "computed weight": (
        lambda m, x: F.conv2d(x, m.a.weight * x.mean()),
        IMAGE,
        "it reads the image, and is no convolution",
    ),
    "weight computed of something else": (
        lambda m, x: F.conv2d(x, m.a.weight * m.b.weight.sin()),
        IMAGE,
        "its weight is computed",
    ),
    "rounded on the way": (
        lambda m, x: m.a(x.bfloat16().float()),
        IMAGE,
        "its image is rounded to another dtype on the way",
    ),
    "truncated on the way": (
        lambda m, x: m.a(x.int().float()),
        IMAGE,
        "its image is rounded to another dtype on the way",
    ),
    "many taps": (
        lambda m, x: m.w(x),
        IMAGE,
        "its filters hold more than 64 numbers: cuDNN is faster there",
    ),
    "double": (
        lambda m, x: F.conv2d(x.double(), m.a.weight.double()),
        IMAGE,
        "its weight is computed",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_it_declines(name: str) -> None:
    function, x, reason = DECLINED[name]
    result = apply_to_untouched(OnCpu(), program_of(stem(function), x))
    assert (result.rewrites, [each.reason for each in result.declined]) == (0, [reason])


def test_other_inputs_are_none_of_its_own() -> None:
    wide = program_of(nn.Conv2d(5, 4, 3), torch.randn(1, 5, 8, 8))
    assert apply_to_untouched(OnCpu(), wide) == Result(wide, 0)
    flat = program_of(nn.Linear(3, 4), torch.randn(2, 3))
    assert apply_to_untouched(OnCpu(), flat) == Result(flat, 0)


def test_choices_for_nodes_that_are_gone_are_left_out() -> None:
    program = program_of(stem(lambda m, x: m.a(x)), IMAGE)
    assert apply_to_untouched(FuseImageConv(choices=(("conv2d_7", TILE),)), program).rewrites == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "its kernel needs CUDA"),
        ({"device": torch.device("cuda")}, "it still runs under autocast"),
    ],
)
def test_it_refuses_whole_programs(change: dict[str, Any], reason: str) -> None:
    program = program_of(stem(lambda m, x: m.a(x)), IMAGE, lane=FP16).replace(**change)
    assert FuseImageConv().why_not(program) == reason


def test_it_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.passes.fuse_image_conv.is_available", lambda: False)
    program = program_of(stem(lambda m, x: m.a(x)), IMAGE).replace(device=torch.device("cuda"))
    assert FuseImageConv().why_not(program) == "Triton is not installed"


class _ForgetsTheActivation(OnCpu):
    def apply(self, program: Program) -> Result:
        return spoilt(super().apply(program), _forget_activations)


def _forget_activations(module: fx.GraphModule) -> None:
    for node in calls(module, [_definition]):
        node.args = (*node.args[:4], "", *node.args[5:])


def test_the_check_catches_an_activation_that_is_forgotten() -> None:
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(_ForgetsTheActivation(), stem(lambda m, x: m.a(x).relu()), IMAGE, rewrites=1)


def test_float32_that_may_not_be_rounded_is_left_to_others() -> None:
    result = apply_to_untouched(FuseImageConv(), program_of(stem(lambda m, x: m.a(x)), IMAGE))
    assert (result.rewrites, result.declined) == (0, (Declined("conv2d", "float32 has no Tensor Cores"),))


@pytest.mark.gpu
@pytest.mark.parametrize("is_half", [False, True], ids=["TF32", "float16"])
def test_on_a_gpu_the_fastest_tile_is_right(is_half: bool) -> None:
    model = stem(lambda m, x: m.a(x).relu()).cuda()
    x = torch.randn(8, 3, 224, 224, device="cuda")
    above = [BakeAutocast(), ChannelsLast()] if is_half else [AllowTf32()]
    program = program_of(model, x, on_top_of=above, lane=FP16 if is_half else FP32)
    result = FuseImageConv(least_gain=0.0).apply(program)
    assert result.rewrites == 1, result.declined
    assert targets_of(result.program) == [image_conv()]
    (found,), (expected,) = result.program.run(x), (model(x),)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    assert torch.allclose(found, expected, atol=5e-3)
    assert aten.conv2d.default not in targets_of(result.program)
