"""A sensor's NaN reaches the results of a bundle, also in ONNX Runtime, whose maxima and gates lose it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt import robot
from ampopt.bundle.files import open_bundle
from tests.helpers import Model
from tests.support.planted import module_of
from tests.support.sized import sized_module

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

IMAGE = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
SEQUENCE = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
PLACES = (torch.arange(8) % 3).view(1, 1, 8, 1).expand(1, 2, 8, 8)

Function = Callable[..., Any]

LOSING: dict[str, tuple[Function, Tensor]] = {
    "MaxPool": (lambda m, x: F.max_pool2d(m.a(x), 3, 2, 1), IMAGE),
    "MaxPool of all": (lambda m, x: F.adaptive_max_pool2d(m.a(x), 1), IMAGE),
    "MaxPool with places": (lambda m, x: F.max_pool2d(m.a(x), 2, return_indices=True), IMAGE),
    "LSTM": (lambda m, x: m.lstm(x)[0], SEQUENCE),
    "GRU": (lambda m, x: m.gru(x), SEQUENCE),
    "ScatterElements": (lambda m, x: m.a(x).scatter_reduce(2, PLACES, x, "amax"), IMAGE),
}


def losing(forward: Function) -> nn.Module:
    torch.manual_seed(0)
    layers = {
        "a": nn.Conv2d(2, 2, 3, padding=1),
        "lstm": nn.LSTM(4, 5, bidirectional=True),
        "gru": nn.GRU(4, 5, 2, batch_first=True),
    }
    return Model(forward, **layers).eval()


def spoilt(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[5] = torch.nan
    return changed


def results(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@pytest.mark.parametrize("kind", LOSING)
def test_a_bundle_keeps_nan_in_onnx_runtime(kind: str, tmp_path: Path) -> None:
    forward, x = LOSING[kind]
    model, path, faulty = losing(forward), tmp_path / "robot.ampopt", spoilt(x)
    module_of(model, x).save(path, tune_s=0.0)
    alone = robot.load(path, engine="onnxruntime")(faulty.numpy())
    arrays = alone.values() if isinstance(alone, dict) else [alone]
    loaded = ampopt.load(path, backend="onnxruntime")(faulty)
    expected = results(model(faulty))
    assert any(tensor.isnan().any() for tensor in expected)
    for found in (list(map(torch.from_numpy, arrays)), results(loaded)):
        for output, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(output, wanted.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_bundle_for_several_sizes_keeps_nan(tmp_path: Path) -> None:
    model, path = losing(LOSING["MaxPool"][0]), tmp_path / "robot.ampopt"
    sized_module(model, IMAGE, dynamic={"batch": (1, 3)}).save(path, tune_s=0.0)
    faulty = spoilt(IMAGE.repeat(2, 1, 1, 1))
    found = torch.from_numpy(robot.load(path, engine="onnxruntime")(faulty.numpy()))
    torch.testing.assert_close(found, model(faulty).detach(), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kind", ["MaxPool", "LSTM", "ScatterElements"])
def test_a_bundle_keeps_nan_in_openvino_as_before(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    forward, x = LOSING[kind]
    model, path, faulty = losing(forward), tmp_path / "robot.ampopt", spoilt(x)
    module_of(model, x).save(path, tune_s=0.0)
    found = torch.from_numpy(robot.load(path, engine="openvino")(faulty.numpy()))
    torch.testing.assert_close(found, model(faulty).detach(), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_an_exported_file_stays_plain_and_says_so(tmp_path: Path) -> None:
    forward, x = LOSING["MaxPool"]
    module = module_of(losing(forward), x)
    report = module.export_onnx(tmp_path / "model.onnx")
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node] == ["Conv", "MaxPool"]
    assert any("ONNX Runtime's MaxPool" in note for note in report.notes)


def test_a_bundle_without_such_operators_is_the_exported_file(tmp_path: Path) -> None:
    module = module_of(losing(lambda m, x: m.a(x).relu()), IMAGE)
    module.export_onnx(tmp_path / "model.onnx")
    module.save(tmp_path / "robot.ampopt", tune_s=0.0)
    stored = open_bundle(tmp_path / "robot.ampopt").read("model.onnx")
    assert stored == (tmp_path / "model.onnx").read_bytes()
