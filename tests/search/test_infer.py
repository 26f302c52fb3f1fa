"""Inputs inferred from a model's first layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ampopt.errors import InputError
from ampopt.search.infer import SIDE, infer_inputs
from tests.helpers import Model
from tests.support.planted import optimize

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("model", "shape", "layer"),
    [
        (nn.Conv1d(5, 2, 3), [1, 5, SIDE], "Conv1d"),
        (nn.Sequential(nn.Identity(), nn.Conv2d(1, 2, 3)), [1, 1, SIDE, SIDE], "Conv2d"),
        (nn.Sequential(nn.ReLU(), nn.Linear(7, 2), nn.Conv2d(1, 1, 1)), [1, 7], "Linear"),
    ],
)
def test_the_first_layer_with_weights_says_what_goes_in(
    model: nn.Module, shape: list[int], layer: str
) -> None:
    if layer == "Linear":
        model = model[:2]  # type: ignore[index]
    (x,), note = infer_inputs(model, CPU)
    assert (list(x.shape), x.dtype) == (shape, torch.float32)
    assert note == f"example_inputs were inferred from the first {layer}: {shape}"


def test_the_layers_own_dtype_is_taken() -> None:
    assert infer_inputs(nn.Linear(2, 2).double(), CPU)[0][0].dtype is torch.float64


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.ReLU(), "no layer with weights"),
        (nn.Embedding(3, 3), "a Embedding"),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)), "a BatchNorm2d"),
        (Model(lambda m, x, y: m.c(x) + y, c=nn.Conv2d(3, 3, 1)), "does not take a tensor"),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.Linear(5, 5)), "does not take a tensor"),
    ],
)
def test_where_it_cannot_be_inferred_example_inputs_are_asked_for(model: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        infer_inputs(model, CPU)
    assert "pass example_inputs=(tensor, ...)" in str(caught.value)


@pytest.mark.usefixtures("quick")
def test_a_model_alone_is_optimized_and_the_report_says_for_which_inputs() -> None:
    model = nn.Sequential(nn.Linear(7, 3), nn.ReLU())
    fast = optimize(model, precision="fp32")
    assert fast.report.notes[0] == "example_inputs were inferred from the first Linear: [1, 7]"
    x = torch.randn(1, 7)
    assert torch.allclose(fast(x), model(x), atol=1e-6)
    with pytest.raises(InputError, match="pass example_inputs"):
        optimize(nn.Embedding(3, 3))
