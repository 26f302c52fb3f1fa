"""Weight normalization in captured graphs, and in bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import ampopt
from ampopt.ir.graph import aten, calls
from tests.helpers import Model
from tests.support.planted import module_of

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "along the first dimension": lambda: weight_norm(nn.Conv2d(3, 4, 3)),
    "along another": lambda: weight_norm(nn.ConvTranspose2d(3, 4, 3), dim=1),
    "along the last": lambda: weight_norm(nn.Linear(8, 5), dim=1),
    "along one from the end": lambda: weight_norm(nn.Conv2d(3, 4, 3), dim=-3),
    "of the whole": lambda: weight_norm(nn.Linear(8, 5), dim=-1),
}


@pytest.mark.parametrize("writes", [False, True], ids=["functional", "functionalized"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_normalized_weight_is_written_out_and_can_be_saved(name: str, writes: bool, tmp_path: Path) -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        result: Tensor = m.get_submodule("layer")(x)
        if writes:
            result[:, :1].add_(1)  # a write to a view is for PyTorch to functionalize
        return result

    torch.manual_seed(0)
    model = Model(forward, layer=LAYERS[name]())
    module = module_of(model, X)
    private = [aten._weight_norm.default, aten._weight_norm_interface.default]
    assert not any(calls(module.program.graph, private))
    module.save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", device="cpu")
    for answer in (module(X), loaded(X)):
        torch.testing.assert_close(answer, model(X))
