"""What ampopt has read stays the user's: weights and inputs can be resized afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.deploy.onnx_verify import to_numpy
from ampopt.ir.model_hash import model_hash
from tests.support.planted import module_of

Used = Callable[[nn.Module, Tensor, Path], object]


def _hash(model: nn.Module, x: Tensor, _path: Path) -> None:
    exported = torch.fx.symbolic_trace(model)
    exported.register_buffer("table", model.get_parameter("0.weight").detach())
    model_hash(exported)


def _load(model: nn.Module, x: Tensor, path: Path) -> None:
    pytest.importorskip("onnxscript")
    module_of(model, x).save(path, tune_s=0.1)
    for backend in ("ampopt", "original", "onnxruntime"):
        ampopt.load(path, backend=backend, device="cpu")(x)


def _export(model: nn.Module, x: Tensor, path: Path) -> None:
    pytest.importorskip("onnxscript")
    module_of(model, x).export_onnx(path)


USES: dict[str, Used] = {
    "a hash of the graph": _hash,
    "an array of the input": lambda _model, x, _path: to_numpy(x),
    "optimize": lambda model, x, _path: ampopt.optimize(model, (x,), budget_s=1)(x),
    "export_onnx": _export,
    "save and load": _load,
}


@pytest.mark.parametrize("use", USES)
def test_weights_buffers_and_inputs_can_be_resized_after(tmp_path: Path, use: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).eval(), torch.randn(2, 4)
    USES[use](model, x, tmp_path / "used")
    gc.collect()
    for tensor in (x, *model.parameters(), *model.buffers()):
        tensor.detach().resize_(100, 100)
