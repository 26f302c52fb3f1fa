"""Numbers that sizes make, in operators of tensors, are PyTorch's in ONNX files at every size of a range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ampopt.errors import ExportError
from ampopt.ir.graph import aten, calls
from ampopt.ir.size_numbers import with_numbers_as_tensors
from tests.helpers import Model, program_of
from tests.support.exporting import export, run

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(0))
DYNAMIC = {"inputs_0": {2: "height", 3: "width"}}
SIZES = ((16, 24), (9, 13), (17, 40), (32, 11), (12, 12))

Function = Callable[[Tensor, int, int], Tensor]


def _places(x: Tensor) -> Tensor:
    """For each channel an integer below height times width, which differ by 7 in turn."""
    return torch.arange(4)[None] * 7 + x.flatten(2).shape[2] // 2


NUMBERS: dict[str, Function] = {
    "remainder": lambda x, h, w: x * 100 % w,
    "remainder of a product": lambda x, h, w: x * 1000 % (h * w),
    "remainder by a ratio": lambda x, h, w: x % (w / 3),
    "remainder of a size": lambda x, h, w: w % (x.abs() + 1),
    "remainder of a number": lambda x, h, w: x.mean() % w,
    "remainder of integers": lambda x, h, w: _places(x) % w,
    "remainder of negative integers": lambda x, h, w: (x * 30).long() % w,
    "remainder of int32": lambda x, h, w: _places(x).int() % w,
    "C's remainder": lambda x, h, w: torch.fmod(x * 100, w),
    "quotient": lambda x, h, w: x * 100 // w,
    "quotient by a negative size": lambda x, h, w: x * 100 // -w,
    "quotient of negative integers": lambda x, h, w: (x * 30).long() // w,
    "quotient towards zero": lambda x, h, w: torch.div(x * 30, w, rounding_mode="trunc"),
    "ratio of integers": lambda x, h, w: _places(x) / w,
    "power": lambda x, h, w: (x * 0.1).abs() ** w,
    "power of a ratio": lambda x, h, w: x.abs() ** (w / 16),
    "power of a size": lambda x, h, w: w ** (x * 0.1),
    "sum with a product": lambda x, h, w: x + h * w,
    "difference with a factor": lambda x, h, w: torch.rsub(x, w, alpha=2),
    "limited from above": lambda x, h, w: (x * 30).clamp(max=w),
    "limited from below": lambda x, h, w: (x * 30).clamp(min=h),
    "limited on both sides": lambda x, h, w: (x * 30).clamp(-1.5, w),
    "limited integers": lambda x, h, w: _places(x).clamp(max=w / 2),
    "filled by a mask": lambda x, h, w: x.masked_fill(x > 0, w),
    "chosen": lambda x, h, w: torch.where(x > 0, h, w),
    "compared": lambda x, h, w: x * 30 > h,
    "integers compared with a ratio": lambda x, h, w: _places(x) > w / 2,
    "equal": lambda x, h, w: _places(x) == w,
    "bits": lambda x, h, w: _places(x) & w,
    "full": lambda x, h, w: x + torch.full((1, 4, h, w), w),
    "a range by a size": lambda x, h, w: x + torch.arange(w) / w,
    "a logarithm's factor": lambda x, h, w: torch.xlogy(w, x.abs()),
}

LISTS: dict[str, Function] = {
    "rolled, one back": lambda x, h, w: torch.roll(x, (h // 2, -(w // 3)), (2, -1)),
    "rolled by a number and a size": lambda x, h, w: torch.roll(x, (1, -h), (1, 3)),
    "rolled as one row": lambda x, h, w: torch.roll(x, w // 2),
    "repeated": lambda x, h, w: x.mean(3).repeat_interleave(w, 1),
    "repeated as one row": lambda x, h, w: x.mean(3).repeat_interleave(w),
    "padded": lambda x, h, w: torch.nn.functional.pad(x, (0, w // 2, h // 2, 0)),
    "resized": lambda x, h, w: torch.nn.functional.interpolate(x, size=(h // 2, w // 2)),
    "the largest": lambda x, h, w: x.topk(h // 2, 2)[0],
}


@pytest.mark.parametrize("functions", [NUMBERS, LISTS], ids=["numbers", "lists"])
def test_results_are_pytorchs_at_every_size(functions: dict[str, Function], tmp_path: Path) -> None:
    def forward(_: Any, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x, x.shape[2], x.shape[3]) for function in functions.values())

    path = tmp_path / "m.onnx"
    export(Model(forward), path, X, dynamic=DYNAMIC)
    for height, width in SIZES:
        x = torch.randn(1, 4, height, width)
        for name, found, expected in zip(functions, run(path, x), forward(None, x), strict=True):
            where = f"{name}, {height} x {width}"
            assert str(found.dtype) == str(expected.dtype).removeprefix("torch."), where
            assert found.shape == tuple(expected.shape), where
            assert np.allclose(found, expected, rtol=1e-4, atol=1e-4), where


def test_a_scale_in_float16_may_be_larger_than_float16_holds(tmp_path: Path) -> None:
    model, path = Model(lambda m, x: x.sum((2, 3)) / (x.shape[2] * x.shape[3] * 1000)), tmp_path / "m.onnx"
    export(model, path, X.half(), dynamic=DYNAMIC)
    x = torch.randn(1, 4, 40, 60).half() + 1
    (found,) = run(path, x)
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=2e-3, atol=0.0)


def test_sizes_stay_numbers() -> None:
    graph = program_of(Model(lambda m, x: x.reshape(x.shape[0], -1) % 3), X).graph
    changed = with_numbers_as_tensors(graph, (X,))
    assert not list(calls(changed, [aten.scalar_tensor.default]))
    assert [node.target for node in calls(changed)] == [node.target for node in calls(graph)]


REFUSED: dict[str, Function] = {
    "a slope": lambda x, h, w: torch.nn.functional.leaky_relu(x, 1 / w),
    "a factor": lambda x, h, w: torch.addcmul(x, x, x, value=w),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_number_that_onnx_has_as_a_constant_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"aten\.\w+\.default, \w+ \(helpers.py:\d+\): sizes, which vary, make a number"
    ):
        export(
            Model(lambda m, x: REFUSED[name](x, x.shape[2], x.shape[3])),
            tmp_path / "m.onnx",
            X,
            dynamic=DYNAMIC,
        )
