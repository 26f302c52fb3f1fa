"""`ampopt export` and `ampopt verify`: what they write, print and return."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
import torch

import ampopt
from ampopt.bundle_files import open_bundle
from ampopt.signing import generate_keys
from tests.ampopt.planted import NO_ENGINES
from tests.ampopt.test_cli import CODE, QUICK, call

INPUT = ("--input", "1x3x8x8", "--device", "cpu", *QUICK)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The MODEL argument of a small network."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny.py").write_text(CODE)
    return f"{tmp_path / 'tiny.py'}:Tiny"


def test_export_writes_verified_onnx(model: str, tmp_path: Path) -> None:
    target, report = tmp_path / "m.onnx", tmp_path / "r.json"
    result = call("export", model, "-o", target, *INPUT, "--onnx", "fp16", "--json", report)
    assert result.exit_code == 0, result.output
    assert f"{target}: verified; fp16" in result.stdout.replace("\n", "")
    facts = json.loads(report.read_text())
    assert facts["verified"]
    assert facts["precision"] == "fp16"
    loaded = onnx.load(target)
    assert [value.name for value in loaded.graph.input] == ["image"]
    assert {"ampopt.verified": "yes"}.items() <= {p.key: p.value for p in loaded.metadata_props}.items()


def test_export_writes_a_bundle_that_verify_passes(model: str, tmp_path: Path) -> None:
    generate_keys(tmp_path / "private.pem", tmp_path / "public.pem")
    target, report = tmp_path / "robot.ampopt", tmp_path / "v.json"
    result = call("export", model, "-o", target, *INPUT, "--sign", tmp_path / "private.pem", "--cpp")
    assert result.exit_code == 0, result.output
    assert "saved" in result.stdout
    assert "program.pt" in open_bundle(target).names
    relaxed = ("--hz", "20", "--seconds", "1", "--slack", "1000", "--deadline-ms", "45")
    key = ("--verify-key", tmp_path / "public.pem")
    result = call("verify", target, "--device", "cpu", *relaxed, *key, "--json", report)
    assert result.exit_code == 0, result.output
    assert "self-test: passed" in result.stdout
    facts = json.loads(report.read_text())
    assert facts["passed"]
    assert facts["paced"]["frames"] == 20
    assert facts["back_to_back"]["p50_ms"] > 0
    assert facts["first_frame_ms"] > 0
    assert facts["memory_bytes"] > 0


def test_verify_fails_where_frames_come_faster_than_answers(tmp_path: Path) -> None:
    fast = ampopt.optimize(
        torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 64, 64), budget_s=2.0, exclude=NO_ENGINES,
        progress=False,
    )  # fmt: skip
    assert isinstance(fast, ampopt.OptimizedModule)
    fast.save(tmp_path / "b", onnx=None)
    result = call("verify", tmp_path / "b", "--hz", "100", "--seconds", "0.5", "--deadline-ms", "0.001")
    assert result.exit_code == 1
    assert "frames at 100 Hz missed the deadline of 0.001 ms" in result.stdout.replace("\n", "")
    assert not result.stderr  # a verdict is no error


@pytest.mark.parametrize("change", ["flip", "cut", "text"])
def test_verify_refuses_what_is_no_whole_bundle(change: str, tmp_path: Path) -> None:
    fast = ampopt.optimize(torch.nn.ReLU(), torch.randn(2), budget_s=1.0, exclude=NO_ENGINES, progress=False)
    assert isinstance(fast, ampopt.OptimizedModule)
    target = tmp_path / "b"
    fast.save(target, onnx=None)
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes({"flip": bytes(data), "cut": bytes(data[:-9]), "text": b"hello"}[change])
    result = call("verify", target)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the bundle")
    assert result.stderr.count("\n") == 1


def test_a_model_of_several_graphs_cannot_be_exported(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ampopt, "optimize", lambda *args, **options: torch.nn.Identity())
    result = call("export", model, "-o", tmp_path / "m.onnx", *INPUT)
    assert result.exit_code == 1
    assert "cannot be captured as one graph" in result.stderr
    assert not (tmp_path / "m.onnx").exists()
