"""What OpenVINO computes otherwise than PyTorch: a bundle says so, and does not run in it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt import robot
from ampopt.bundle.files import open_bundle
from ampopt.deploy import onnx_export
from ampopt.deploy.portable import HALF, portable_program, why_not_openvino
from ampopt.errors import BundleError, VerificationError
from ampopt.ir.lanes import FP32
from ampopt.passes import FoldConvBn, Openvino
from tests.helpers import Model, program_of
from tests.support.planted import captured_of, module_of
from tests.support.sized import sized_module

pytest.importorskip("onnxscript")

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
STAMP = torch.tensor([1, 2**40 + 1])

Function = Callable[..., Any]

OTHERWISE: dict[str, tuple[Function, tuple[Tensor, ...], str]] = {
    "int64": (lambda m, x, stamp: (m.a(x), stamp + 1), (X, STAMP), "int64 in int32, at input 'stamp'"),
    "int32": (lambda m, x, i: (m.a(x), i // 3), (X, STAMP.int()), "int32 in float32, at floor_divide"),
    "int16": (lambda m, x, i: (m.a(x), i * 3), (X, STAMP.short()), "integers of 8 and 16 bits .*, at mul"),
    "uint8": (lambda m, x, i: (m.a(x), i + i), (X, STAMP.byte()), "integers of 8 and 16 bits .*, at add"),
    "float64": (lambda m, x: m.a(x).double() * 2, (X,), "float64 in float32, at to"),
    "a remainder": (lambda m, x: m.a(x) % 0.1, (X,), "remainders .*, at remainder"),
    "a floor": (lambda m, x: m.a(x) // 0.1, (X,), "remainders .*, at floor_divide"),
    "an empty tensor": (lambda m, x: m.a(x)[:0], (X,), "empty, .*, at slice"),
    "the nearest pixel": (
        lambda m, x: F.grid_sample(x, x.view(1, 8, 8, 2), "nearest", align_corners=False),
        (IMAGE,),
        "nearest pixels, at grid_sampler",
    ),
    "antialiasing": (
        lambda m, x: F.interpolate(x, (3, 5), mode="bilinear", antialias=True),
        (IMAGE,),
        "upsample_bilinear2d_aa otherwise, at",
    ),
    "a Fourier transform": (lambda m, x: torch.fft.fft2(x).real, (IMAGE,), "fft_fft2 otherwise, at fft"),
    "the truth of int32": (lambda m, x, i: x * i.bool(), (X[:, :2], STAMP.int()), "smallest int32 for false"),
    "a rounding": (lambda m, x: m.a(x.half().float()), (X,), "roundings to 16 bits out, at to"),
}


def model_of(function: Function) -> nn.Module:
    return Model(function, a=nn.Linear(6, 6)).eval()


@pytest.mark.parametrize(
    ("name", "lane"),
    [
        *((name, FP32) for name in OTHERWISE),
        *((name, HALF) for name in OTHERWISE if name != "a rounding"),  # all is rounded there
    ],
)
def test_a_portable_program_has_the_reason_in_each_precision(name: str, lane: Any) -> None:
    function, inputs, reason = OTHERWISE[name]
    captured = captured_of(model_of(function), *inputs)[1]
    names = ["x", "stamp"][: len(inputs)]
    found = why_not_openvino(portable_program(captured, (), lane), names)
    assert found is not None
    assert re.search(reason, found)
    if lane is FP32 and importlib.util.find_spec("openvino"):
        (declined,) = Openvino(options=()).apply(program_of(model_of(function), *inputs)).declined
        assert found.startswith(declined.reason)


@pytest.mark.parametrize("lane", [FP32, HALF], ids=["fp32", "fp16"])
def test_a_usual_network_has_none(lane: Any) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Softmax(1)).eval()
    captured = captured_of(net, IMAGE)[1]
    assert why_not_openvino(portable_program(captured, (FoldConvBn(),), lane), ["x"]) is None


class Stamped(nn.Module):
    """A time stamp beside what a network makes of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, stamp: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), stamp + 1


@pytest.mark.parametrize("onnx", ["fp32", "fp16"])
@pytest.mark.parametrize("is_there", [True, False], ids=["installed", "not installed"])
def test_a_bundle_is_not_run_in_openvino_and_right_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onnx: str, is_there: bool
) -> None:
    path, fast = tmp_path / "b", module_of(Stamped(), X, STAMP[:1])
    with monkeypatch.context() as without:
        if not is_there:
            find = importlib.util.find_spec
            without.setattr(
                importlib.util, "find_spec", lambda name: None if name == "openvino" else find(name)
            )
        fast.save(path, onnx=onnx, tune_s=0.1)
    reason = "OpenVINO computes int64 in int32, at input 'stamp'"
    assert open_bundle(path).manifest["onnx"]["why_not_openvino"] == reason
    with pytest.raises(BundleError, match=f"{path}: it may not run in OpenVINO: {reason}; choose another"):
        robot.load(path, engine="openvino", retune_seconds=0.1)
    with pytest.raises(BundleError, match=f"{path}: it may not run in OpenVINO: {reason}; choose another"):
        ampopt.load(path, backend="openvino", device="cpu")
    for backend in ("auto", "onnxruntime"):
        loaded = ampopt.load(path, backend=backend, device="cpu")
        assert loaded(X, STAMP[1:])[1].item() == 2**40 + 2
        assert "openvino" not in loaded.choice


def test_a_bundle_that_openvino_may_run_says_so(tmp_path: Path) -> None:
    module_of(nn.Linear(6, 6), X).save(tmp_path / "b", tune_s=0.1)
    assert open_bundle(tmp_path / "b").manifest["onnx"]["why_not_openvino"] is None


def test_a_bundle_for_a_range_of_sizes_is_not_for_openvino(tmp_path: Path) -> None:
    sized_module(nn.Linear(6, 6), X, dynamic={"batch": (1, 3)}).save(tmp_path / "b", tune_s=0.1)
    with pytest.raises(BundleError, match="models of fixed sizes"):
        robot.load(tmp_path / "b", engine="openvino")


def test_a_file_for_openvino_says_what_that_computes_otherwise(tmp_path: Path) -> None:
    fast = module_of(Stamped(), X, STAMP)
    report = fast.export_onnx(tmp_path / "a.onnx", target="openvino")
    assert report.why_not_openvino == "OpenVINO computes int64 in int32, at input 'stamp'"
    assert any(note.startswith(report.why_not_openvino) for note in report.notes)
    assert not any("OpenVINO" in note for note in fast.export_onnx(tmp_path / "b.onnx").notes)


def test_a_file_for_openvino_is_verified_in_it(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    fast = module_of(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()).eval(), IMAGE)
    report = fast.export_onnx(tmp_path / "a.onnx", target="openvino")
    assert "OpenVINO" in report.providers
    assert {row.provider for row in report.outputs} >= {"OpenVINO", "CPUExecutionProvider"}
    assert any(note.startswith("OpenVINO: ") for note in report.notes), "its ReLU takes NaN for 0"
    assert "OpenVINO" not in fast.export_onnx(tmp_path / "b.onnx").providers
    dynamic = fast.export_onnx(tmp_path / "c.onnx", target="openvino", dynamic="batch")
    assert "OpenVINO" not in dynamic.providers


def test_a_file_that_is_wrong_in_openvino_is_not_written_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes int64 in int32, which the rule about that would say."""
    pytest.importorskip("openvino")
    monkeypatch.setattr(onnx_export, "why_not_openvino", lambda program, names, varies: None)
    fast = module_of(Stamped(), X, STAMP)
    with pytest.raises(VerificationError, match=r"wrong.* on OpenVINO"):
        fast.export_onnx(tmp_path / "a.onnx", target="openvino")
    assert not (tmp_path / "a.onnx").exists()
    assert fast.export_onnx(tmp_path / "b.onnx").verified
