"""What is scattered in ONNX Runtime is what PyTorch scatters, in every way, and with infinities."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.ir.graph import calls
from ampopt.ir.scatter_forms import FORMS
from tests.helpers import Model, program_of
from tests.support.exporting import export, run

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
NUMBERS = torch.tensor([0, 2, 1, 2, 0])
WAYS = ("amax", "amin", "prod", "mean", "sum")


def _slices(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    found = []
    for way in WAYS[:-1]:
        for with_own in (True, False):
            found.append(torch.ones(4, 7).index_reduce(0, NUMBERS, x, way, include_self=with_own))
            turned = torch.ones(7, 4)
            found.append(turned.index_reduce(1, NUMBERS, x.T.contiguous(), way, include_self=with_own))
    return tuple(found)


def _elements(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    index = NUMBERS[:, None].expand(5, 7)
    found = [
        torch.ones(4, 7).scatter_reduce(0, index, x, way, include_self=with_own)
        for way in WAYS
        for with_own in (True, False)
    ]
    whole = (x * 9).nan_to_num(0, 90, -90).long()
    return *found, *(
        torch.zeros_like(whole).scatter_reduce(0, index, whole, w, include_self=False) for w in WAYS[:2]
    )


def _places(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    places = torch.tensor([[0, 17, -1]])
    added = x.put(places, x[:1, :3], accumulate=True)
    return (
        added,
        x.put(places[:, :2], x[:1, :2]),
        (x * 9).nan_to_num(0, 9, -9).int().put(places, places.int()),
    )


@pytest.mark.parametrize("function", [_slices, _elements, _places])
def test_a_file_gives_what_the_model_gives(function: Callable[..., Any], tmp_path: Path) -> None:
    export(Model(function), tmp_path / "m.onnx", X)
    infinite = X.clone()
    infinite[[0, 4], 2], infinite[1] = math.inf, -math.inf
    for given in (X, -2 * X, torch.zeros_like(X), infinite):
        expected = function(None, given)
        for place, (a, b) in enumerate(zip(expected, run(tmp_path / "m.onnx", given), strict=True)):
            torch.testing.assert_close(torch.from_numpy(b), a, equal_nan=True, msg=f"result {place}")


def test_every_form_is_used_by_one_of_these() -> None:
    graphs = [program_of(Model(f), X).graph for f in (_slices, _elements, _places)]
    assert {node.target for graph in graphs for node in calls(graph, FORMS)} == FORMS.keys()
