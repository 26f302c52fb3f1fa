"""The portable program: every portable rewrite, CUDA's float16 casts, and nothing of this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.portable import HALF, portable_program
from ampopt.errors import InputError
from ampopt.ir.emulated_half import EmulatedHalf
from ampopt.ir.graph import aten
from ampopt.ir.lanes import FP32, Lane, mixed
from ampopt.ir.numerics import relative_error
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass
from ampopt.passes import (
    AllowTf32,
    ChannelsLast,
    Degroup,
    FuseConvAct,
    KeepFp32,
    MergeLinearChain,
    RemoveInferenceNoops,
)
from tests.helpers import Model, check_graph, dtypes_of, reference_of, targets_of, with_statistics
from tests.support import overflowing
from tests.support.planted import captured_of

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def portable(model: nn.Module, x: Tensor = X, *, lane: Lane = HALF, recipe: tuple[Pass, ...] = ()) -> Program:
    program = portable_program(captured_of(model.eval(), x)[1], recipe, lane)
    check_graph(program)
    return program


def run(program: Program, x: Tensor) -> Tensor:
    with EmulatedHalf():
        return program.run(x)[0]


def conv_bn() -> nn.Module:
    return with_statistics(nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU()))


@pytest.mark.parametrize("lane", [FP32, HALF])
def test_batch_norms_are_folded_although_no_recipe_says_so(lane: Lane) -> None:
    model = conv_bn()
    program = portable(model, lane=lane)
    assert targets_of(program).count(aten.batch_norm.default) == 0
    assert relative_error(run(program, X), reference_of(model, [X])[0]) < torch.finfo(lane.dtype).eps * 8


def test_what_only_this_machine_can_run_is_left_out() -> None:
    recipe = (AllowTf32(), ChannelsLast(), FuseConvAct())
    program = portable(conv_bn(), lane=FP32, recipe=recipe)
    assert [step.name for step in program.recipe] == ["fold-conv-bn"]
    assert not program.settings.tf32


def test_measured_choices_of_the_recipe_are_kept() -> None:
    choices = Degroup(choices=(("conv2d", "merge=2"),))
    program = portable(conv_bn(), recipe=(choices,))
    assert choices in program.recipe
    conv = next(n for n in program.graph.graph.nodes if n.target is aten.conv2d.default)
    assert conv.args[6] == 1


def test_linear_chains_are_merged_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    program = portable(model, X, lane=FP32, recipe=(MergeLinearChain(),))
    assert [step.name for step in program.recipe] == ["merge-linear-chain"]


def test_float16_means_the_operators_that_cudas_autocast_means() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        return m.norm(y.softmax(1)).exp() + y.sum((2, 3), keepdim=True)

    model = Model(function, conv=nn.Conv2d(4, 8, 3), norm=nn.GroupNorm(2, 8))
    with EmulatedHalf():
        found = dtypes_of(portable(model))
    assert found["conv2d"] is torch.float16
    for name in ("softmax", "group_norm", "exp", "sum_1"):
        assert found[name] is torch.float32, f"{name} runs in {found[name]}"


def test_layer_norm_is_float32_throughout() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    with EmulatedHalf():
        found = dtypes_of(portable(model))
    assert found["layer_norm"] is torch.float32
    assert found["linear"] is found["linear_1"] is torch.float16


def test_a_batch_norm_that_cannot_be_folded_gets_one_dtype() -> None:
    model = with_statistics(
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    )
    program = portable(model)
    with EmulatedHalf():
        found = dtypes_of(program)
    assert found["batch_norm"] is torch.float32
    assert found["conv2d_1"] is torch.float16
    assert relative_error(run(program, X), reference_of(model, [X])[0]) < 2e-3


def test_float16_is_no_product_of_the_cpu() -> None:
    """Under emulation a float16 convolution is the float32 one, rounded."""
    x, w = X.half(), torch.randn(3, 4, 3, 3).half()
    with EmulatedHalf():
        y = torch.nn.functional.conv2d(x, w)
    assert torch.equal(y, torch.nn.functional.conv2d(x.float(), w.float()).half())


def test_autocast_is_as_it_was_afterwards() -> None:
    before = torch.is_autocast_enabled("cuda"), torch.is_autocast_cache_enabled()
    portable(conv_bn())
    assert (torch.is_autocast_enabled("cuda"), torch.is_autocast_cache_enabled()) == before


def test_other_precisions_are_refused() -> None:
    with pytest.raises(InputError, match="float32 or float16"):
        portable(conv_bn(), lane=mixed("amp", torch.bfloat16))


@pytest.mark.parametrize("by_size", [True, False])
def test_what_judges_by_the_examples_sizes_is_left_out_for_others(
    by_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoveInferenceNoops, "shape_dependent", by_size)
    captured, step = captured_of(nn.Sequential(nn.Dropout(), nn.ReLU()).eval(), X)[1], RemoveInferenceNoops()
    assert step in portable_program(captured, (), FP32).recipe
    assert (step in portable_program(captured, (), FP32, dynamic=True).recipe) is not by_size


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_what_stays_in_fp32_here_does_so_in_a_float16_file(kind: str) -> None:
    model, x = overflowing.attention(), torch.randn(overflowing.TOKENS)
    plain = portable(model, x)
    assert not torch.isfinite(run(plain, x)).all()
    program = portable(model, x, recipe=(KeepFp32(choices=(("matmul", kind), ("softmax", "back"))),))
    assert relative_error(run(program, x), reference_of(model, [x])[0]) < 5e-3
    assert dtypes_of(program)["matmul"] is torch.float32
