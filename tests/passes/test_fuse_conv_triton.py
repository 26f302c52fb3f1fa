"""fuse-conv-triton: what is matched, and what is declined, computed by the definition of its operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ampopt.ir.graph import aten, calls
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Result
from ampopt.kernels.conv_chains import Chain
from ampopt.kernels.fused_conv import fused_conv, reference
from ampopt.passes import FuseConvTriton
from tests.helpers import (
    FP16,
    Model,
    apply_to_untouched,
    check_graph,
    check_pass,
    program_of,
    spoilt,
    text_of,
)
from tests.support.convolving import NHWC, Function, convolving


def _definition(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    z: Tensor | None,
    s: Tensor | None,
    geometry: list[int],
    groups: int,
    act1: str,
    act2: str,
    tile: str,
) -> Tensor:
    y = reference(x, w, b, z, s, geometry, groups, act1, act2)
    return y.contiguous(memory_format=torch.channels_last) if geometry else y


class OnCpu(FuseConvTriton):
    """The pass with the first tile chosen everywhere, and the operator replaced by its definition."""

    def why_not(self, program: Program) -> str | None:
        return None

    def _choose(
        self, chains: Sequence[Chain], program: Program, end: float
    ) -> tuple[dict[str, str], list[Declined]]:
        return {chain.conv.name: str(chain.site.tiles()[0]) for chain in chains}, []

    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        if not result.modified:
            return result
        return dataclasses.replace(spoilt(result, _use_definition), replay=result.replay)


def _use_definition(module: fx.GraphModule) -> None:
    for node in calls(module, [fused_conv()]):
        node.target = _definition


def _squeezed(m: Any, x: Tensor) -> Tensor:
    return m.q(m.p(x.mean((2, 3), keepdim=True)).relu()).sigmoid()  # type: ignore[no-any-return]


def _describe(chain: Chain) -> str:
    site = chain.site
    words = ["reordered"] * chain.reorder + ["scaled"] * site.scale
    words += [chain.conv.name, site.act1, "add" if site.add else "", site.act2]
    return " ".join(word for word in words if word)


FUSED: dict[str, tuple[Function, list[str]]] = {
    "conv": (lambda m, x: m.a(x), ["conv2d"]),
    "relu": (lambda m, x: m.a(x).relu(), ["conv2d relu"]),
    "hardswish": (lambda m, x: F.hardswish(m.s(x)), ["conv2d hardswish"]),
    "relu6": (lambda m, x: F.relu6(m.a(x)), ["conv2d relu6"]),
    "hardtanh": (lambda m, x: F.hardtanh(m.a(x), 0, 6), ["conv2d relu6"]),
    "another hardtanh": (lambda m, x: F.hardtanh(m.a(x), 0, 5), ["conv2d"]),
    "clamp": (lambda m, x: m.a(x).clamp(min=0), ["conv2d relu"]),
    "two-sided clamp": (lambda m, x: m.a(x).clamp(0, 6), ["conv2d relu6"]),
    "gelu by tanh": (lambda m, x: F.gelu(m.a(x), approximate="tanh"), ["conv2d gelu_tanh"]),
    "two activations": (lambda m, x: m.a(x).relu().sigmoid(), ["conv2d relu"]),
    "residual block": (
        lambda m, x: (m.b(m.a(x).relu()) + x).relu(),
        ["conv2d relu", "conv2d_1 add relu"],
    ),
    "addition from the right": (lambda m, x: x + m.a(x), ["conv2d add"]),
    "activation before the addition": (lambda m, x: F.silu(m.a(x)) + x, ["conv2d silu add"]),
    "downsample block": (
        lambda m, x: (m.t(x) + m.d(x)).relu(),
        ["conv2d add relu", "conv2d_1"],
    ),
    "downsample block, the other way": (
        lambda m, x: (m.d(x) + m.t(x)).relu(),
        ["conv2d add relu", "conv2d_1"],
    ),
    "squeeze and excite": (
        lambda m, x: m.q((y := F.hardswish(m.w(x))) * _squeezed(m, y)) + x,
        ["conv2d hardswish", "conv2d_1 relu", "conv2d_2 sigmoid", "scaled conv2d_3 add"],
    ),
    "factors before more than a pixel": (
        lambda m, x: m.a(x * x.mean((2, 3), keepdim=True)),
        ["conv2d"],
    ),
    "factors that are read twice": (
        lambda m, x: [m.p(y := x * x.mean((2, 3), keepdim=True)), y.tanh()],
        ["conv2d"],
    ),
    "grouped": (lambda m, x: m.g(x).relu(), ["conv2d relu"]),
    "two readers": (lambda m, x: [y := m.a(x), y.relu()], ["conv2d"]),
    "two readers of the activation": (lambda m, x: [(y := m.a(x).relu()) + x, y], ["conv2d relu"]),
    "added to itself": (lambda m, x: (y := m.a(x)) + y, ["conv2d"]),
    "addition with a factor": (lambda m, x: torch.add(m.a(x), x, alpha=2), ["conv2d"]),
    "addition that broadcasts": (lambda m, x: m.a(x) + x[:1], ["conv2d"]),
    "addition of a number": (lambda m, x: m.a(x) + 1, ["conv2d"]),
    "addition of another layout": (
        lambda m, x: m.a(x) + x.permute(0, 1, 3, 2).contiguous(),
        ["conv2d"],
    ),
    "linear": (lambda m, x: F.gelu(m.l(x.mean((2, 3)))), ["linear gelu"]),
    "linear residual": (
        lambda m, x: m.l(y := x.flatten(2).permute(0, 2, 1).contiguous()) + y,
        ["linear add"],
    ),
    "slice of channels": (lambda m, x: m.p(torch.cat([x, x], 1)[:, 8:24]), ["conv2d"]),
    "another order": (lambda m, x: m.a(x.permute(0, 1, 3, 2)).relu(), ["reordered conv2d relu"]),
    "two readers of another order": (
        lambda m, x: m.a(y := x.permute(0, 1, 3, 2)) + m.b(y),
        ["reordered conv2d add", "reordered conv2d_1"],
    ),
    "one tap with a border": (
        lambda m, x: F.conv2d(x, m.p.weight, m.p.bias, padding=1),
        ["conv2d"],
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_it_fuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, choose = list[Sequence[Chain]](), OnCpu._choose

    def noted(*args: Any) -> Any:
        given.append(args[1])
        return choose(*args)

    monkeypatch.setattr(OnCpu, "_choose", noted)
    function, expected = FUSED[name]
    model, x, elsewhere = convolving(function), torch.randn(2, 16, 8, 8), [torch.randn(3, 16, 6, 6)]
    result = check_pass(
        OnCpu(), model, x, rewrites=len(expected), on_top_of=NHWC, elsewhere=elsewhere, limit=1e-5
    )
    chains = given[0]
    assert [_describe(chain) for chain in chains] == expected
    assert result.replay == OnCpu(choices=tuple((c.conv.name, str(c.site.tiles()[0])) for c in chains))


def test_the_fused_calls_read_as_documented() -> None:
    model = convolving(lambda m, x: (m.s(F.hardswish(m.w(x))) + m.s(x)).relu())
    program = program_of(model, torch.randn(2, 16, 8, 8), on_top_of=NHWC)
    choices = (("conv2d", "depthwise:8:32:1:1:2:1:ieee"), ("conv2d_1", "dense:16:32:32:1:2:4:ieee"))
    fused = FuseConvTriton(choices=choices).apply(program)
    assert text_of(fused.program).splitlines() == [
        "fused_conv_default = ampopt.fused_conv.default(inputs_0, conv2d_weight_1, p_w_bias, None, None, "
        "[1, 1, 1, 1, 1, 1], 16, hardswish, , depthwise:8:32:1:1:2:1:ieee)",
        "conv2d_2 = aten.conv2d.default(inputs_0, conv2d_2_weight, p_s_bias, [2, 2], [2, 1], [2, 2])",
        "fused_conv_default_1 = ampopt.fused_conv.default(fused_conv_default, conv2d_1_weight_1, p_s_bias, "
        "conv2d_2, None, [2, 2, 2, 1, 2, 2], 1, , relu, dense:16:32:32:1:2:4:ieee)",
    ]
    check_graph(fused.program)


def test_an_input_in_another_order_is_copied_once() -> None:
    model = convolving(lambda m, x: [m.a(y := x.permute(0, 1, 3, 2)), m.b(y), m.s(y.sin())])
    result = OnCpu().apply(program_of(model, torch.randn(2, 16, 8, 8), on_top_of=NHWC))
    clones = list(calls(result.program.graph, [aten.clone.default]))
    assert result.rewrites == 3
    assert [clone.args[0].name for clone in clones].count("permute") == 1  # type: ignore[union-attr]


def test_a_copy_that_comes_later_is_not_taken() -> None:
    model = convolving(
        lambda m, x: [m.a(y := x.permute(0, 1, 3, 2)), y.clone(memory_format=torch.channels_last)]
    )
    check_pass(OnCpu(), model, torch.randn(2, 16, 8, 8), rewrites=1, on_top_of=NHWC)


DECLINED: dict[str, tuple[nn.Module, Tensor, str]] = {
    "computed weight": (
        Model(lambda m, x: F.conv2d(x, m.weight * x.mean()), weight=torch.randn(4, 4, 3, 3)),
        torch.randn(1, 4, 8, 8),
        "its weight is computed",
    ),
    "computed bias": (
        Model(lambda m, x: F.linear(x, m.w, x.mean((0, 1))), w=torch.randn(4, 4)),
        torch.randn(2, 3, 4),
        "its weight is computed",
    ),
    "double": (nn.Linear(4, 4).double(), torch.randn(2, 4).double(), "there is no kernel for float64"),
    "image without a batch": (nn.Conv2d(4, 4, 3), torch.randn(4, 8, 8), "its input has no batch"),
    "vector without a batch": (nn.Linear(4, 4), torch.randn(4), "its input has no batch"),
    "linear layer in another order": (
        Model(lambda m, x: m.l(x.permute(0, 2, 1)), l=nn.Linear(4, 4)),
        torch.randn(2, 4, 3),
        "its input is not contiguous",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_it_declines(name: str) -> None:
    model, x, reason = DECLINED[name]
    result = check_pass(OnCpu(), model, x, rewrites=0)
    assert [declined.reason for declined in result.declined] == [reason]


def test_a_program_with_its_channels_outermost_is_laid_out_anew_together_with_the_kernels() -> None:
    x = torch.randn(1, 4, 8, 8)
    program = program_of(nn.Conv2d(4, 4, 3), x)
    result = check_pass(OnCpu(), nn.Conv2d(4, 4, 3), x, rewrites=1)
    assert program.entry[0].memory_format is torch.contiguous_format
    assert result.program.entry[0].memory_format is torch.channels_last


def test_it_refuses_programs_that_read_memory_by_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.passes.fuse_conv_triton.is_available", lambda: True)
    model = Model(lambda m, x: m.a(x).as_strided((2, 3), (3, 1)), a=nn.Conv2d(4, 4, 3))
    program = program_of(model, torch.randn(1, 4, 8, 8)).replace(device=torch.device("cuda"))
    assert str(FuseConvTriton().why_not(program)).endswith("reads memory by its strides")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "its kernels need CUDA"),
        ({"device": torch.device("cuda")}, "it still runs under autocast"),
    ],
)
def test_it_refuses_whole_programs(change: dict[str, Any], reason: str) -> None:
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4), lane=FP16).replace(**change)
    assert FuseConvTriton().why_not(program) == reason


def test_it_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.passes.fuse_conv_triton.is_available", lambda: False)
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4)).replace(device=torch.device("cuda"))
    assert FuseConvTriton().why_not(program) == "Triton is not installed"


def test_choices_for_nodes_that_are_gone_are_left_out() -> None:
    program = program_of(convolving(lambda m, x: m.a(x)), torch.randn(2, 16, 8, 8), on_top_of=NHWC)
    tile = "dense:16:32:32:1:2:4:ieee"
    result = apply_to_untouched(FuseConvTriton(choices=(("conv2d", tile), ("conv2d_7", tile))), program)
    assert (result.rewrites, result.replay) == (1, FuseConvTriton(choices=(("conv2d", tile),)))
    nothing = apply_to_untouched(FuseConvTriton(choices=(("conv2d_7", tile),)), program)
    assert (nothing.rewrites, nothing.declined) == (0, ())


@pytest.mark.parametrize(
    ("function", "size", "tile"),
    [
        pytest.param(lambda m, x: m.a(x), 8, "depthwise:8:32:1:1:2:1:ieee", id="depthwise"),
        pytest.param(lambda m, x: m.a(x), 8, "vector:1:4:256:1:4:1:ieee", id="taps"),
        pytest.param(
            lambda m, x: m.p(x * x.mean((2, 3), keepdim=True)), 2, "vector:1:4:256:1:4:1:ieee", id="factors"
        ),
    ],
)
def test_a_choice_that_does_not_fit_the_shape_is_declined(function: Function, size: int, tile: str) -> None:
    program = program_of(convolving(function), torch.randn(2, 16, size, size), on_top_of=NHWC)
    result = apply_to_untouched(FuseConvTriton(choices=(("conv2d", tile),)), program)
    assert result.rewrites == 0
    assert result.declined == (Declined("conv2d", "the tile that was chosen does not fit this shape"),)


class _ForgetsTheAddition(OnCpu):
    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        return spoilt(result, _forget_additions) if result.modified else result


def _forget_additions(module: fx.GraphModule) -> None:
    for node in calls(module, [_definition]):
        node.args = (*node.args[:3], None, *node.args[4:])


def test_the_check_catches_an_addition_that_is_forgotten() -> None:
    model = convolving(lambda m, x: (m.a(x) + x).relu())
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(_ForgetsTheAddition(), model, torch.randn(2, 16, 8, 8), rewrites=1, on_top_of=NHWC)


def test_where_values_decide_narrow_groups_are_not_computed_together() -> None:
    def largest(m: Any, x: Tensor) -> Tensor:
        y = m.g(x)
        return y.gather(1, y.argmax(1, keepdim=True))  # type: ignore[no-any-return]

    model = Model(largest, g=nn.Conv2d(16, 16, 3, padding=1, groups=4))
    result = OnCpu().apply(program_of(model, torch.randn(1, 16, 8, 8), on_top_of=NHWC))
    assert result.rewrites == 0
    assert "NaN of one of its groups would reach others" in result.declined[0].reason
