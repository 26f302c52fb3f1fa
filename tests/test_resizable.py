"""What ampopt has read stays the user's: weights and inputs can be resized afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.deploy.onnx_verify import to_numpy
from ampopt.diagnosis.own_onnx import node_parts
from ampopt.ir.model_hash import model_hash
from ampopt.ir.transform import Engine
from ampopt.passes import OnnxRuntime, Openvino, onnx_runtime, openvino
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


class Difference(nn.Module):
    """A network of two inputs, whose calls go through a whole engine; one input has a path of its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.network(x - y)


def network_of(count: int) -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    return network if count == 1 else Difference(network).eval()


ENGINES = [OnnxRuntime(), OnnxRuntime(session=()), Openvino(), Openvino(options=())]
FRAMES: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(1, 3, 8, 8),
    "a leaf of gradients": lambda: torch.randn(1, 3, 8, 8, requires_grad=True),
    "a part of a batch": lambda: torch.randn(2, 3, 8, 8)[1:],
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_examples_and_inputs_of_an_engine_can_be_resized_after(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, count: int
) -> None:
    for package in engine.packages:
        pytest.importorskip(package)
    monkeypatch.setattr(onnx_runtime, "TUNING_S", 0.05)
    monkeypatch.setattr(onnx_runtime, "COMPARING_S", 0.05)
    monkeypatch.setattr(openvino, "TUNING_S", 0.05)
    given = [torch.randn(1, 3, 8, 8) for _ in range(count)]
    fast = module_of(network_of(count), *given, passes=(engine,))
    assert fast.program.engine is not None
    for make in FRAMES.values():
        frames = [make() for _ in range(count)]
        with torch.no_grad():
            for _ in range(2):  # the second call may be quicker
                fast(*frames)
        given += frames
    assert all(tensor.untyped_storage().resizable() for tensor in given)


def test_examples_whose_nodes_are_timed_can_be_resized_after() -> None:
    pytest.importorskip("onnxscript")
    x = torch.randn(1, 3, 8, 8)
    engine = OnnxRuntime(session=())
    program = module_of(network_of(1), x, passes=(engine,)).program.replace(recipe=(engine,))
    assert node_parts(program)
    assert all(each.untyped_storage().resizable() for each in (x, *program.examples))
