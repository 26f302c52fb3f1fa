"""Factors that float16 does not hold are multiplied by in float32, and others in float16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from ampopt.errors import ExportError
from ampopt.ir.graph import aten, calls
from ampopt.ir.half_numbers import with_numbers_that_fit
from tests.helpers import Model
from tests.support.exporting import export, run

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))


def _graph(function: Callable[[Tensor], Tensor], x: Tensor) -> fx.GraphModule:
    return torch.export.export(Model(lambda _, x: function(x)), (x,)).module()


def _casts(graph: fx.GraphModule) -> int:
    return len(list(calls(graph, [aten._to_copy.default])))


@pytest.mark.parametrize("number", [1e-7, 3e-8, 1e-12, 1e5, -1e6, 100000])
@pytest.mark.parametrize("scale", [torch.mul, torch.div])
def test_a_number_that_float16_rounds_is_used_in_float32(scale: Any, number: float) -> None:
    x = X.half()
    graph = _graph(lambda x: scale(x, number), x)
    changed = with_numbers_that_fit(graph, (x,))
    assert _casts(changed) == 2
    assert torch.equal(changed(x), scale(x, number))
    assert _casts(with_numbers_that_fit(changed, (x,))) == 2
    assert _casts(graph) == 0


@pytest.mark.parametrize("number", [0.0, 1.0, 0.1, 1 / 3, 1e-3, 65504.0, float("inf"), float("nan"), 7])
def test_other_numbers_are_left_alone(number: float) -> None:
    graph = _graph(lambda x: x * number / 255, X.half())
    assert with_numbers_that_fit(graph, (X.half(),)) is graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    graph = _graph(lambda x: x * 1e-7, X.to(dtype))
    assert _casts(with_numbers_that_fit(graph, (X.to(dtype),))) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.linear(x) * 1e3 * 1e-7 * 1e3,
        lambda m, x: m.linear(x) / 1e5 * 1e5,
        lambda m, x: (m.linear(x) * 1e4) / 1e6 * 100,
    ],
    ids=["a small factor", "a large factor", "a large divisor"],
)
def test_files_in_float16_scale_as_pytorch_does(function: Callable[..., Any], tmp_path: Path) -> None:
    model = Model(function, linear=nn.Linear(16, 16)).eval()
    assert export(model, tmp_path / "model.onnx", X, precision="fp16").verified
    for x in (X, 10 * X):
        with torch.no_grad():
            wanted = model(x)
        (found,) = run(tmp_path / "model.onnx", x)
        assert torch.allclose(
            torch.from_numpy(found), wanted, rtol=5e-3, atol=5e-3 * float(wanted.abs().max())
        )


def test_a_number_that_float16_refuses_is_named(tmp_path: Path) -> None:
    model = Model(lambda m, x: m.linear(x).clamp(-1e5, 1e5), linear=nn.Linear(16, 16))
    with pytest.raises(ExportError, match="does not run in float16: RuntimeError: value cannot"):
        export(model, tmp_path / "model.onnx", X, precision="fp16")
