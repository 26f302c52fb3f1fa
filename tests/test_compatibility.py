"""Bundles that earlier versions saved load and answer as their models do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt import robot

BUNDLES = Path(__file__).parent / "data"
"""Two bundles that the commit 42c9077 saved of the model of `original`, one for each lane."""


class Net(nn.Module):
    """The model in the bundles."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))}


def original() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.parametrize(("lane", "tolerance"), [("fp32", 1e-4), ("amp", 0.05)])
def test_a_bundle_of_42c9077_loads_and_answers_as_its_model_does(lane: str, tolerance: float) -> None:
    loaded = ampopt.load(BUNDLES / f"bundle-42c9077-{lane}.zip", backend="ampopt", device="cpu", budget_s=5)
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = original()(x)["logits"]
        found = loaded(x)["logits"]
    assert found.dtype is expected.dtype
    assert torch.linalg.vector_norm(found - expected) <= tolerance * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("lane", ["fp32", "amp"])
def test_the_onnx_model_of_such_a_bundle_runs_without_pytorch(lane: str) -> None:
    loaded = robot.load(BUNDLES / f"bundle-42c9077-{lane}.zip")
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = original()(x)["logits"].numpy()
    found = loaded(x.numpy())
    assert isinstance(found, np.ndarray)
    assert np.allclose(found, expected, atol=1e-5)
