"""Files: external weights, metadata, wrong exports refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from torch import nn

from ampopt.deploy import onnx_export, onnx_files
from ampopt.errors import VerificationError
from ampopt.system.atomic import replacing_together
from tests.support.exporting import X, conv_bn, export, run


def test_large_weights_go_to_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "EXTERNAL_BYTES", 1000)
    model, path = nn.Sequential(nn.Conv2d(4, 64, 3)), tmp_path / "m.onnx"
    for _ in range(2):  # the second export replaces both files
        report = export(model, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert report.data_sha256 == onnx_files.sha256_of(tmp_path / "m.onnx.data")
    assert np.allclose(run(path, X)[0], model(X).detach().numpy(), atol=1e-5)


def test_the_hashes_are_of_what_was_verified_whatever_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_files, "EXTERNAL_BYTES", 1000)
    model, path = nn.Sequential(nn.Conv2d(4, 64, 3)), tmp_path / "m.onnx"
    usual = export(model, path)

    @contextlib.contextmanager
    def replaced_at_once(*places: Path) -> Iterator[Path]:
        with replacing_together(*places) as folder:
            yield folder
        for place in places:
            place.unlink()

    monkeypatch.setattr(onnx_export, "replacing_together", replaced_at_once)
    report = export(model, path)
    assert (report.sha256, report.data_sha256) == (usual.sha256, usual.data_sha256)
    assert report.data_sha256 is not None


def test_the_metadata_says_what_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    report = export(conv_bn(), path, precision="fp16")
    facts = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert facts["ampopt.model_sha256"] == report.model_sha256
    assert facts["ampopt.verified"] == "yes"
    assert facts["ampopt.lane"] == "fp16"
    assert float(facts["ampopt.error"]) == pytest.approx(report.error, rel=0.01)
    assert str(Path.cwd()).encode() not in path.read_bytes(), "a path of this machine is in the file"
    assert b"stack_trace" not in path.read_bytes()


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter that doubles a weight."""

    def write(model: Any, path: Path) -> None:
        onnx_files.write_model(model, path)
        proto = onnx.load(path)
        weight = onnx.numpy_helper.to_array(proto.graph.initializer[0]) * 2
        proto.graph.initializer[0].CopyFrom(
            onnx.numpy_helper.from_array(weight, proto.graph.initializer[0].name)
        )
        onnx.save(proto, path)

    monkeypatch.setattr(onnx_export, "write_model", write)


@pytest.mark.usefixtures("wrong")
def test_a_wrong_export_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_text("the old one")
    with pytest.raises(VerificationError, match=r"'output' has error .* over .*force=True"):
        export(conv_bn(), path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_text() == "the old one"


@pytest.mark.usefixtures("wrong")
def test_force_keeps_a_wrong_export_and_marks_it(tmp_path: Path) -> None:
    report = export(conv_bn(), tmp_path / "m.onnx", force=True)
    facts = {entry.key: entry.value for entry in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert facts["ampopt.verified"] == "no"
    assert "has error" in facts["ampopt.failure"]
    assert not report.verified
