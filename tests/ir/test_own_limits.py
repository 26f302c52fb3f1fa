"""Limits of a dtype that a model writes, as masks of attention do, hold in every lane."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.onnx_export import export_onnx
from ampopt.ir.casting import POLICIES
from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.numerics import relative_error
from ampopt.passes import BakeAutocast, RemoveInferenceNoops
from tests.helpers import BF16, FLOORS, FP16, Model
from tests.support.planted import captured_of, optimize

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
FUTURE = torch.ones(8, 8, dtype=torch.bool).triu(1)


def _masked(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    scores = y @ y.transpose(-1, -2)
    attention = scores.masked_fill(m.future, torch.finfo(scores.dtype).min).softmax(-1)
    out: Tensor = attention @ y
    return out


def _chosen(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    scores = y @ y.transpose(-1, -2)
    attention = torch.where(m.future, torch.finfo(scores.dtype).min, scores).softmax(-1)
    out: Tensor = attention @ y
    return out


def _filled(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    return torch.full_like(y, torch.finfo(y.dtype).min).maximum(y)


def _bounded(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    limits = torch.finfo(y.dtype)
    out: Tensor = torch.nan_to_num(y / 0.0, 0.0, limits.max, limits.min).clamp(-1, 1) + y.clamp(limits.min)
    return out


def _smallest(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    squares = (y * y + 1e-3) * torch.ones_like(y)
    out: Tensor = (squares + torch.finfo(y.dtype).tiny).log()
    return out


MODELS = (_masked, _chosen, _filled, _bounded, _smallest)


def model_of(function: Callable[..., Any]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(function, linear=nn.Linear(16, 16), future=FUTURE).eval()


@pytest.mark.parametrize("lane", [FP16, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("function", MODELS)
def test_a_limit_is_float32s_in_a_lane_of_lower_precision(function: Callable[..., Any], lane: Lane) -> None:
    original, captured = captured_of(model_of(function), X)
    start = lane.start(captured.program)
    with torch.no_grad():
        expected = original(X)
    for program in (start, *(BakeAutocast(policy=policy).apply(start).program for policy in POLICIES)):
        (found,) = program.run(X)
        assert found.dtype is torch.float32
        assert relative_error(found, expected) <= 4 * FLOORS[lane.dtype]


def test_the_logarithm_of_the_smallest_number_is_finite() -> None:
    model = Model(
        lambda m, x: m.linear(x).clamp(min=torch.finfo(x.dtype).tiny).log(), linear=nn.Linear(16, 4)
    )
    _, captured = captured_of(model.eval(), X)
    (found,) = FP16.start(captured.program).run(X)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("function", MODELS)
def test_in_float32_nothing_is_left_of_the_casts(function: Callable[..., Any]) -> None:
    original, captured = captured_of(model_of(function), X)
    program = RemoveInferenceNoops().apply(FP32.start(captured.program)).program
    assert not any(calls(program.graph, [aten.to.dtype, aten._to_copy.default]))
    with torch.no_grad():
        assert torch.equal(program.run(X)[0], original(X))


def test_numbers_that_are_no_limits_are_left_alone() -> None:
    model = Model(
        lambda m, x: m.linear(x).masked_fill(m.future[:, :4], -1e9), linear=nn.Linear(16, 4), future=FUTURE
    )
    _, captured = captured_of(model.eval(), X)
    assert not any(calls(captured.program.graph, [aten.to.dtype]))


def test_a_model_of_doubles_keeps_them() -> None:
    model = Model(lambda m, x: x.masked_fill(m.future[:, :1], torch.finfo(torch.float32).min), future=FUTURE)
    original, captured = captured_of(model.eval(), X.double())
    assert torch.equal(captured.program.run(X.double())[0], original(X.double()))


def test_such_a_mask_is_served_and_exported_in_float16(tmp_path: Path) -> None:
    model = model_of(_masked)
    fast = optimize(model, X, precision="amp", amp_dtype=torch.float16, cache=False, budget_s=20.0)
    assert not [note for note in fast.report.notes if "not tried" in note]
    with torch.no_grad():
        assert relative_error(fast(X), model(X)) < 1e-2
    original, captured = captured_of(model, X)
    assert export_onnx(original, captured, (), tmp_path / "model.onnx", precision="fp16").verified
