"""script: TorchScript runs the program."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.errors import PassError
from ampopt.ir.graph import copy_of
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass, Result, replay
from ampopt.passes import BakeAutocast, ChannelsLast, CudaGraph, FoldConvBn, Script
from tests.helpers import (
    BF16,
    FP16,
    Model,
    Unpooling,
    apply_to_untouched,
    check_keeps_nan,
    check_outputs,
    check_pass,
    error_of,
    program_of,
    several_kinds,
)

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one output": (several_kinds, (2, 3, 10, 10)),
    "several outputs": (
        lambda: Model(lambda m, x: (m.a(x).relu(), {"max": x.max(1), "mask": x > 0}), a=nn.Linear(4, 4)),
        (3, 4),
    ),
    "a tuple of one": (lambda: Model(lambda m, x: (m.a(x),), a=nn.Linear(4, 4)), (3, 4)),
    "an output that is an input": (lambda: Model(lambda m, x: (x, m.a(x)), a=nn.Linear(4, 4)), (3, 4)),
    "unpooling": (Unpooling, (1, 3, 8, 8)),
    "attention": (lambda: Model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2)), (3, 2, 8)),
    "recurrent": (lambda: Model(lambda m, x: m.a(x)[0], a=nn.GRU(4, 4)), (3, 2, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_computes_what_the_model_does(name: str) -> None:
    build, shape = MODELS[name]
    model, x = build().eval(), torch.randn(shape)
    program = program_of(model, x)
    result = apply_to_untouched(Script(), program)
    assert result.rewrites == 1
    assert result.program.graph is program.graph
    assert result.program.engine is not None
    check_outputs(Script.numerics, program, result.program, model, [x], FP32)


@pytest.mark.parametrize(
    ("lane", "before"),
    [
        pytest.param(FP32, [FoldConvBn(), ChannelsLast()], id="folded channels_last"),
        pytest.param(BF16, [BakeAutocast(), FoldConvBn(), ChannelsLast()], id="baked"),
    ],
)
def test_it_runs_rewritten_programs(lane: Lane, before: list[Pass]) -> None:
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program = program_of(model, x, lane=lane, on_top_of=before)
    check_outputs(Script.numerics, program, Script().apply(program).program, model, [x], lane)


def test_its_replay_is_right_for_another_shape() -> None:
    model, x, elsewhere = several_kinds(), torch.randn(2, 3, 10, 10), torch.randn(1, 3, 12, 8)
    result = Script().apply(program_of(model, x))
    there = program_of(model, elsewhere)
    replayed = replay((result.replay or Script(),), there)
    assert replayed.engine is not None
    check_outputs(Script.numerics, there, replayed, model, [elsewhere], FP32)


def test_a_shape_that_its_cpu_kernels_cannot_do_is_refused_or_right() -> None:
    """oneDNN's adaptive pooling wants sizes that divide; only an AmpoptError lets the runtime fall back."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2)), torch.randn(1, 3, 9, 9)
    with contextlib.suppress(PassError):
        assert error_of(Script().apply(program_of(model, x)).program, model, [x]) < 5e-6


def test_a_second_apply_does_nothing() -> None:
    once = Script().apply(program_of(several_kinds(), torch.randn(2, 3, 10, 10))).program
    assert apply_to_untouched(Script(), once).rewrites == 0


def test_a_program_that_still_runs_under_autocast_is_refused() -> None:
    program = program_of(several_kinds(), torch.randn(2, 3, 10, 10), lane=BF16)
    assert Script().why_not(program) == "it still runs under autocast"
    assert Script().why_not(BakeAutocast().apply(program).program) is None


@pytest.mark.parametrize("lane", [FP32, BF16])
@pytest.mark.parametrize("behind", [F.relu, partial(F.max_pool2d, kernel_size=2), F.relu6, F.hardsigmoid])
def test_it_keeps_nan(behind: Callable[[Tensor], Tensor], lane: Lane) -> None:
    model = Model(lambda m, x: behind(m.c(x) + x), c=nn.Conv2d(4, 4, 3, padding=1))
    x = torch.randn(1, 4, 8, 8)
    program = program_of(model, x, lane=lane, on_top_of=[BakeAutocast()])
    check_keeps_nan(Script().apply(program).program, model, [x], lane)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f.__name__: f for f in (torch.sigmoid, torch.tanh, torch.abs, torch.exp, torch.square, torch.sqrt)},
    **{f.__name__: f for f in (F.silu, F.hardswish, F.gelu, F.elu, F.leaky_relu, F.softplus, F.mish)},
    "hardtanh": F.hardtanh,
    "a gate": lambda x: x.sigmoid() * 2,
    "softmax": lambda x: x.softmax(1),
    "average": lambda x: F.avg_pool2d(x, 2),
    "larger": lambda x: torch.maximum(x, x * 2),
}


@pytest.mark.parametrize("channels", [1, 8, 16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_keeps_nan_behind_narrow_and_wide_convolutions(name: str, channels: int) -> None:
    """oneDNN takes another kernel for few channels."""
    model = Model(lambda m, x: ACTIVATIONS[name](m.c(x)), c=nn.Conv2d(4, channels, 1, stride=2))
    x = torch.randn(1, 4, 16, 16)
    check_keeps_nan(Script().apply(program_of(model, x)).program, model, [x], FP32)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (y := x[x > 0]).narrow(0, y.shape[0] // 2, y.shape[0] - y.shape[0] // 2),
        lambda m, x: x * x.sum().item(),
        lambda m, x: x.nonzero()[: x.nonzero().shape[0] // 2],
    ],
)
def test_numbers_that_depend_on_values_are_refused(function: Any) -> None:
    program = program_of(Model(function), torch.randn(3, 4))
    assert "depends on the inputs' values" in (Script().why_not(program) or "")


def test_weights_that_are_packed_for_onednn_are_refused() -> None:
    program = program_of(nn.Linear(8, 8), torch.randn(2, 8))
    module = copy_of(program.graph)
    module.p_weight = torch.randn(8, 8).to_mkldnn()
    reason = Script().why_not(program.with_graph(module))
    assert reason == "its weights are packed for oneDNN, which a trace cannot hold"


class _TracesAnotherProgram(Script):
    """An engine made from weights that are a little off."""

    def apply(self, program: Program) -> Result:
        module = copy.deepcopy(program.graph)
        for weight in module.buffers():
            weight.mul_(1 + 1e-4)
        result = super().apply(program.with_graph(module))
        return Result(program.replace(engine=result.program.engine), result.rewrites)


def test_the_check_catches_an_engine_with_other_weights() -> None:
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program = program_of(model, x)
    wrong = _TracesAnotherProgram().apply(program).program
    with pytest.raises(AssertionError, match="the error is"):
        check_outputs(Script.numerics, program, wrong, model, [x], FP32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lane", "before"),
    [
        pytest.param(FP32, [FoldConvBn()], id="fp32"),
        pytest.param(FP16, [BakeAutocast(), FoldConvBn(), ChannelsLast()], id="baked channels_last"),
    ],
)
@pytest.mark.parametrize("launch", [[], [CudaGraph()]], ids=["launched call by call", "cuda graph"])
def test_on_a_gpu_the_engine_computes_what_the_model_does(
    lane: Lane, before: list[Pass], launch: list[Pass]
) -> None:
    model, x = several_kinds().cuda(), torch.randn(2, 3, 10, 10, device="cuda")
    program = program_of(model, x, lane=lane, on_top_of=before)
    after = replay((Script(), *launch), program)
    assert after.engine is not None
    check_outputs(Script.numerics, program, after, model, [x], lane)


@pytest.mark.parametrize(
    "constant",
    [
        lambda m: m.a.weight,
        lambda m: m.a.weight.t(),
        lambda m: torch.ones(3),
        lambda m: torch.arange(3).reshape(3, 1),
        lambda m: torch.tensor([1.0, 2.0]),
        lambda m: (m.a.weight * 2)[0],
    ],
    ids=["weight", "its view", "ones", "a view of integers", "literal", "computed"],
)
def test_an_output_that_depends_on_no_input_is_the_callers_own_in_every_call(constant: Any) -> None:
    model = Model(lambda m, x: (m.a(x), constant(m)), a=nn.Linear(4, 4))
    check_pass(Script(), model, torch.randn(3, 4), rewrites=1)


def test_a_program_that_overflows_only_where_it_is_frozen_is_refused() -> None:
    conv, norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, eps=1e-12)
    assert norm.running_var is not None
    norm.running_var.data[0] = 0.0
    model = nn.Sequential(conv, norm, nn.Sigmoid()).half().eval()
    program = program_of(model, torch.randn(1, 4, 8, 8).half())
    assert bool(torch.isfinite(program.run(*program.examples)[0]).all())
    with pytest.raises(PassError, match="overflows where the graph does not"):
        Script().apply(program)
