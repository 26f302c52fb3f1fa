"""A function that autocast is to call in FP32 is called so by programs under autocast, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.casting import POLICIES
from ampopt.ir.custom_forward import shown_as_under_autocast
from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.passes import BakeAutocast, RemoveInferenceNoops
from tests.helpers import BF16, FP16, Model
from tests.support.planted import captured_of

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))


def _gram(x: Tensor) -> Tensor:
    large = 300.0 * x
    product = large @ large.mT
    return product / product.abs().amax()


class _InFp32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _gram(x)


class _AsItComes(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _gram(x)


def _model(function: type[torch.autograd.Function]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(lambda m, x: function.apply(m.linear(x)), linear=nn.Linear(16, 16)).eval()


@pytest.mark.parametrize("lane", [FP16, BF16], ids=["float16", "bfloat16"])
def test_it_gives_what_eager_gives_under_autocast(lane: Lane) -> None:
    original, captured = captured_of(_model(_InFp32), X)
    start = lane.start(captured.program)
    with torch.no_grad(), torch.autocast("cpu", dtype=lane.dtype, cache_enabled=False):
        expected = original(X)
    assert bool(expected.isfinite().all())
    assert torch.equal(start.run(X)[0], expected)
    assert torch.equal(BakeAutocast().apply(start).program.run(X)[0], expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_lowers_it(policy: str) -> None:
    original, captured = captured_of(_model(_InFp32), X)
    (found,) = BakeAutocast(policy=policy).apply(FP16.start(captured.program)).program.run(X)
    with torch.no_grad():
        assert torch.allclose(found, original(X), atol=2e-3)


def test_in_float32_nothing_of_it_is_left() -> None:
    original, captured = captured_of(_model(_InFp32), X)
    program = RemoveInferenceNoops().apply(FP32.start(captured.program)).program
    assert not any(calls(program.graph, [aten.to.dtype]))
    with torch.no_grad():
        assert torch.equal(program.run(X)[0], original(X))


def test_a_function_that_takes_what_comes_is_lowered_as_any_other() -> None:
    _, captured = captured_of(_model(_AsItComes), X)
    assert not [node for node in calls(captured.program.graph) if FULL_PRECISION in node.meta]


def test_others_are_told_what_is() -> None:
    own = torch.is_autocast_enabled
    with shown_as_under_autocast():
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_enabled is own
