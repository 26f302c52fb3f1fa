"""A program under autocast does what the model does, also where that switches autocast off for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.graph import aten, calls, dtype_of
from ampopt.ir.lanes import Lane
from ampopt.ir.own_autocast import as_under_autocast
from ampopt.ir.shapes import record_shapes
from ampopt.passes import FoldConstants
from tests.helpers import BF16, FP16, Model
from tests.support.planted import captured_of, optimize

X = 30.0 * torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0))
LARGE = 300.0
"""Products of values as large as this overflow in float16."""


def _attention(m: Any, x: Tensor) -> Tensor:
    """Linear attention as EfficientViT has it: its sums overflow in float16."""
    q, k = (LARGE * part.relu() for part in m.qkv(x).chunk(2, dim=-1))
    with torch.autocast("cpu", enabled=False):
        q, k = q.float(), k.float()
        out = q @ (k.transpose(-1, -2) @ k)
        out = out / (out.sum(-1, keepdim=True) + 1e-5)
    y: Tensor = m.proj(out)
    return y


def _twice(m: Any, x: Tensor) -> Tensor:
    return _attention(m, _attention(m, x))


def _from_the_input(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        low, high = (LARGE * x @ (LARGE * x).transpose(-1, -2)).aminmax(dim=-1, keepdim=True)
    y: Tensor = m.proj((x - low) / (high - low))
    return y


def _on_again_inside(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        gram = (LARGE * x).transpose(-1, -2) @ (LARGE * x)
        with torch.autocast("cpu", dtype=torch.float16):
            y = m.proj(x)
        gram = gram / gram.abs().amax()
    out: Tensor = y @ gram.to(y.dtype)
    return out


def _at_the_end(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.proj(x)
    with torch.autocast("cpu", enabled=False):
        large = LARGE * y.float()
        return large @ large.transpose(-1, -2), y


def _of_constants(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        gram = m.table @ m.table.t()
        gram = gram / gram.abs().amax()
    y: Tensor = m.proj(x) @ gram
    return y


MODELS = (_attention, _twice, _from_the_input, _on_again_inside, _at_the_end, _of_constants)


def model_of(function: Callable[..., Any]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        table = LARGE * torch.randn(16, 16)
        return Model(function, qkv=nn.Linear(16, 32), proj=nn.Linear(16, 16), table=table).eval()


def by_eager(model: nn.Module, x: Tensor, low: torch.dtype) -> tuple[Tensor, ...]:
    with torch.no_grad(), torch.autocast("cpu", dtype=low, cache_enabled=False):
        found = model(x)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize(
    ("function", "lane"),
    [(f, lane) for f in MODELS for lane in (FP16, BF16) if (f, lane) != (_on_again_inside, BF16)],
)
def test_it_is_off_where_the_model_says_so(function: Callable[..., Any], lane: Lane) -> None:
    original, captured = captured_of(model_of(function), X)
    program = lane.start(captured.program)
    expected = by_eager(original, X, lane.dtype)
    assert all(bool(tensor.isfinite().all()) for tensor in expected)
    for found, wanted in zip(program.run(X), expected, strict=True):
        assert torch.equal(found, wanted)


def test_shapes_are_recorded_in_the_dtypes_that_it_has_there() -> None:
    _, captured = captured_of(model_of(_attention), X)
    module = record_shapes(FP16.start(captured.program))
    products = {str(node): dtype_of(node) for node in calls(module, [aten.matmul.default])}
    assert set(products.values()) == {torch.float32}
    assert {dtype_of(node) for node in calls(module, [aten.linear.default])} == {torch.float16}


def test_constants_of_such_calls_are_folded_without_it() -> None:
    original, captured = captured_of(model_of(_of_constants), X)
    result = FoldConstants().apply(FP16.start(captured.program))
    assert result.modified
    for found, wanted in zip(result.program.run(X), by_eager(original, X, torch.float16), strict=True):
        assert torch.equal(found, wanted)


def test_a_graph_without_such_calls_runs_as_it_is() -> None:
    _, captured = captured_of(nn.Linear(16, 4).eval(), X)
    assert as_under_autocast(captured.program.graph, captured.program.device) is captured.program.graph


def test_such_a_model_is_served_in_lower_precision_also_far_outside_of_its_example() -> None:
    model, example = model_of(_attention), torch.randn(2, 64, 16)
    fast = optimize(model, example, precision="amp", amp_dtype=torch.float16, cache=False)
    assert "overflows" not in str(fast.report)
    for x in (example, torch.zeros_like(example), 100.0 * example):
        assert torch.allclose(fast(x), model(x), rtol=0.02, atol=0.02)
