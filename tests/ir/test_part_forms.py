"""What a mask selects, and writes into a diagonal, in ONNX Runtime: PyTorch's values for all offsets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.ir.graph import aten, calls
from ampopt.ir.part_forms import FORMS
from ampopt.ir.stable_forms import with_stable_forms
from tests.helpers import Model, program_of
from tests.support.exporting import export, run

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
MATRIX = X[0, 0]


def _diagonals(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Diagonals of several pairs of dimensions, with what is not the same for all elements."""
    found = []
    for first, second, offsets in ((-2, -1, (-5, -4, 0, 2, 3, 6)), (3, 1, (-5, 1)), (0, 2, (0, 4))):
        for offset in offsets:
            y = x + 1
            torch.diagonal(y, offset, first, second).mul_(3).add_(x.mean())
            found.append(y)
    return tuple(found)


def _filled(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    found = [x + 1, (x + 1).T.contiguous(), x[:, :5] * 2, (x > 0).clone(), (x * 9).int()]
    for y in found:
        torch.diagonal(y).fill_(0)
    y, tall = x * 2, (x.T * 2).contiguous()
    return *found, y.fill_diagonal_(-1.0), tall.fill_diagonal_(3), y


def _means(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Where nothing is selected they are NaN."""
    mask = x > 1.0
    of_rows = x[mask[..., 0]]
    means = x[mask].mean(), (x[mask] * 2).exp().mean(), of_rows.mean(0), of_rows.mean((0, 1), keepdim=True)
    spreads = x[mask].var(), x[mask].std(unbiased=False), of_rows.std(0), of_rows.var((0, 1), keepdim=True)
    return *means, *spreads, x[x == x.max()].std(), x.half()[mask].mean().float()


def _put(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """By masks, also in later dimensions."""
    columns, rows = x.mean((0, 1, 2)) > 0, (x[0, :, :, 0] > 0)
    a, b, c, d = (x.clone() for _ in range(4))
    a[..., columns] = 0
    b[:, rows] = x[0, 0, 0]
    c[x > 0] = x.max()
    d[:, :, torch.arange(5) % 2 == 0] = torch.tensor([[[7.0]]])
    flags = x > 1
    flags[:, rows] = True
    return a, b, c, d, flags


def _selected(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    of_rows = x.masked_select(x[:, :, :1] > 0)
    of_one_image = x[0].masked_select(x > 0.5)
    return of_rows, of_one_image, x.masked_select(x > 0).mean(), (x * 9).int().masked_select(x > 0)


@pytest.mark.parametrize(
    ("function", "x"),
    [(_diagonals, X), (_filled, MATRIX), (_selected, X), (_means, X[0]), (_put, X)],
)
def test_a_file_gives_what_the_model_gives(function: Callable[..., Any], x: Tensor, tmp_path: Path) -> None:
    model = Model(function)
    export(model, tmp_path / "m.onnx", x)
    for given in (x, -2 * x, torch.zeros_like(x)):
        expected = model(given.clone())
        for place, (a, b) in enumerate(zip(expected, run(tmp_path / "m.onnx", given), strict=True)):
            torch.testing.assert_close(torch.from_numpy(b), a, equal_nan=True, msg=f"result {place}")


@pytest.mark.parametrize("function", [_put, _selected])
def test_a_batch_may_vary(function: Callable[..., Any], tmp_path: Path) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        parts = [part.sum() for part in function(m, x[:1])]
        y = x * 2
        y[:, x[0, :, :, 0] > 0] = 1.0
        y[y < -1] *= 3
        return torch.stack([part.float() for part in parts]) + y.flatten(1).sum(1, keepdim=True)

    export(Model(forward), tmp_path / "m.onnx", X, dynamic={"inputs_0": {0: "batch"}})
    x = torch.randn(5, 3, 5, 7)
    torch.testing.assert_close(torch.from_numpy(run(tmp_path / "m.onnx", x)[0]), forward(None, x))


def test_a_mean_of_all_pixels_behind_an_update_by_a_mask_stays_one_of_rows() -> None:
    """The sum of 12,544 numbers one after another, which ONNX Runtime makes of it, loses four digits."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = x - x[x > 0].mean()
        y[y < 0] = y[y < 0] - y[y < 0].mean()
        return y.mean((2, 3))

    x = torch.randn(1, 2, 112, 112)
    formed = with_stable_forms(program_of(Model(forward), x).graph, (x,))
    assert [node.args[1] for node in calls(formed, [aten.mean.dim])] == [[-1], [-2, -1]]


def test_every_form_is_used_by_one_of_these() -> None:
    graphs = [program_of(Model(f), x).graph for f, x in ((_diagonals, X), (_selected, X), (_put, X))]
    assert {node.target for graph in graphs for node in calls(graph, FORMS)} == FORMS.keys()
