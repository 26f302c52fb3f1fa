"""The export as a whole: precisions, targets, the report, and what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy import onnx_files
from ampopt.engines.onnx_graph import OPSETS
from ampopt.errors import ExportError, InputError, MissingExtraError, VerificationError
from tests.helpers import Model
from tests.support.exporting import conv_bn, export


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("io", ["fp32", "fp16"])
def test_inputs_and_outputs_have_the_dtype_asked_for(precision: str, io: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    report = export(conv_bn(), path, precision=precision, io=io)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    kind = {"fp32": "tensor(float)", "fp16": "tensor(float16)"}[io]
    assert [v.type for v in (*session.get_inputs(), *session.get_outputs())] == [kind, kind]
    assert (report.precision, report.io) == (precision, io)


@pytest.mark.parametrize("target", OPSETS)
def test_the_opset_is_the_targets_and_is_read_back(target: str, tmp_path: Path) -> None:
    report = export(conv_bn(), tmp_path / "m.onnx", target=target)
    imports = onnx.load(tmp_path / "m.onnx").opset_import
    assert [(entry.domain, entry.version) for entry in imports] == [("", OPSETS[target])]
    assert report.opset == OPSETS[target]


class Bessel(nn.Module):
    """Ends in a function that ONNX does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """A line that the error names."""
        y = self.conv(x)
        return torch.special.bessel_j0(y)  # type: ignore[no-any-return]


def test_what_onnx_cannot_express_is_named_with_the_users_line(tmp_path: Path) -> None:
    line = Bessel.forward.__code__.co_firstlineno + 3
    with pytest.raises(ExportError, match=rf"bessel_j0.*test_onnx_export\.py:{line}"):
        export(Bessel(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_the_report_is_json(tmp_path: Path) -> None:
    report = export(conv_bn(), tmp_path / "m.onnx").to_dict()
    assert report["sha256"] == onnx_files.sha256_of(tmp_path / "m.onnx")
    assert report["verified"] is True
    assert report["outputs"][0]["name"] == "output"
    assert report["nodes"] == len(onnx.load(tmp_path / "m.onnx").graph.node)


def test_a_model_that_float16_cannot_hold_is_refused_in_float16(tmp_path: Path) -> None:
    """ONNX Runtime's CPU provider gets it right, because it leaves the roundings out."""
    model = Model(lambda m, x: m.conv(m.conv(x) * 1e-9), conv=nn.Conv2d(4, 4, 1, bias=False))
    with pytest.raises(VerificationError, match=r"'output' has error 1 on torch with .+, over 0\.00"):
        export(model, tmp_path / "m.onnx", precision="fp16")
    assert export(model, tmp_path / "m.onnx").verified


def test_options_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for options in ({"precision": "int8"}, {"io": "bf16"}, {"target": "coreml"}):
        with pytest.raises(InputError, match="choose from"):
            export(conv_bn(), tmp_path / "m.onnx", **options)
    with pytest.raises(InputError, match="is a folder"):
        export(conv_bn(), tmp_path)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "m.onnx", tmp_path / f"{'m' * 300}.onnx"):
        with pytest.raises(ExportError, match=r"m\.onnx' cannot be written: .*; see to that path"):
            export(conv_bn(), place)
    with pytest.raises(InputError, match="has a NUL in it"):
        export(conv_bn(), tmp_path / "m\0.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "m.onnx")
    with pytest.raises(InputError, match="is not a regular file"):
        export(conv_bn(), pipe)
    assert pipe.is_fifo()


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"onnxscript is not installed.*ampopt\[onnx\]"):
        export(conv_bn(), tmp_path / "m.onnx")
