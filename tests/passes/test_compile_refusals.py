"""compile: the programs that inductor is not given, with the reason."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.graph import aten, calls, copy_of
from ampopt.ir.program import Program
from ampopt.kernels.fused_conv import fused_conv
from ampopt.passes import BakeAutocast, Compile
from tests.helpers import BF16, Model, program_of, with_statistics


def test_a_program_that_still_runs_under_autocast_is_refused() -> None:
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4), lane=BF16)
    assert Compile().why_not(program) == "it still runs under autocast"
    assert Compile().why_not(BakeAutocast().apply(program).program) is None


def _with_target(target: Any) -> Program:
    """A program of one call, to `target`, on its input."""
    program = program_of(nn.ReLU(), torch.randn(1, 3, 4, 4))
    module = copy_of(program.graph)
    (node,) = calls(module)
    node.target = target
    return program.with_graph(module)


@torch.library.custom_op("ampopt_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An operator of a library: nothing says what is inside."""
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_of_another_library_is_refused() -> None:
    program = program_of(Model(lambda m, x: doubled(x.relu())), torch.randn(2, 4))
    reason = str(Compile().why_not(program))
    assert reason.startswith("inductor cannot see into ampopt_tests.doubled.default of doubled (helpers.py:")


def test_an_operator_without_a_fake_kernel_is_refused() -> None:
    target = aten.miopen_convolution_relu.default
    assert Compile().why_not(_with_target(target)) == f"inductor cannot see into {target} of relu"


def test_ampopts_own_operator_is_worked_around() -> None:
    assert Compile().why_not(_with_target(fused_conv())) is None


def test_a_python_function_is_refused_and_the_operator_module_is_not() -> None:
    reason = Compile().why_not(_with_target(torch.nn.functional.relu))
    assert reason is not None
    assert reason.startswith("inductor cannot see into <function relu")
    assert Compile().why_not(_with_target(operator.neg)) is None


@pytest.mark.parametrize(
    "model",
    [
        with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())),
        Model(lambda m, x: torch.nn.functional.interpolate(m.a(x), scale_factor=2), a=nn.Conv2d(3, 4, 1)),
        Model(lambda m, x: m.a(x.flatten(2), x.flatten(2), x.flatten(2))[0], a=nn.MultiheadAttention(100, 4)),
        Model(lambda m, x: m.a(x.flatten(2))[0], a=nn.LSTM(100, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardswish(), nn.MaxPool2d(2), nn.Flatten(), nn.Softmax(1)),
    ],
    ids=["convolution and norm", "upsampling", "attention", "recurrent", "pooling"],
)
def test_ordinary_models_are_taken(model: nn.Module) -> None:
    assert Compile().why_not(program_of(model, torch.randn(2, 3, 10, 10))) is None
