"""What OpenVINO is known to compute has PyTorch's results; resizing that may round otherwise is unknown."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import onnx_ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.engines.onnx_graph import to_onnx
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner, first_unknown
from tests.helpers import Model, program_of
from tests.support.side_by_side import parts_of

pytest.importorskip("onnxscript")
pytest.importorskip("openvino")

X = torch.randn(1, 3, 14, 6, generator=torch.Generator().manual_seed(0))
ROWS = X[0]

Function = Callable[..., Any]


def resized(**options: Any) -> Function:
    return lambda _model, x: F.interpolate(x, **options)


KNOWN: dict[str, tuple[Function, Tensor]] = {
    "a power": (lambda m, x: x**2 + x.abs() ** 1.5 + 2**x, X),
    "tiles": (lambda m, x: x.repeat(1, 2, 1, 1), X),
    "sums and products": (lambda m, x: (x.norm(p=1, dim=-1), x.prod(-1), x.cumsum(-1)), X),
    "angles": (lambda m, x: torch.sin(x) + torch.cos(x) + torch.atan(x), X),
    "einsum": (lambda m, x: torch.einsum("bij,bkj->bik", x, x), ROWS),
    "an LSTM": (lambda m, x: m.lstm(x)[0], ROWS),
    "a GRU": (lambda m, x: m.gru(x)[0], ROWS),
    "bilinear by a factor": (resized(scale_factor=2, mode="bilinear"), X),
    "bilinear": (resized(size=(9, 11), mode="bilinear"), X),
    "bilinear to one pixel": (resized(size=(1, 1), mode="bilinear"), X),
    "bicubic to one pixel": (resized(size=(9, 1), mode="bicubic"), X),
    "bilinear to the same size of 1": (resized(size=(1, 12), mode="bilinear"), X[:, :, :1]),
    "bilinear from corner to corner": (resized(size=(1, 11), mode="bilinear", align_corners=True), X),
    "bicubic": (resized(size=(9, 11), mode="bicubic"), X),
    "bicubic from corner to corner": (resized(size=(9, 11), mode="bicubic", align_corners=True), X),
    "averages of what there is, sizes up": (
        lambda m, x: F.avg_pool2d(x, 5, 4, 2, ceil_mode=True, count_include_pad=False),
        X,
    ),
    "averages without a padding, sizes up": (lambda m, x: F.avg_pool2d(x, 3, 2, ceil_mode=True), X),
    "a normalization of rows": (lambda m, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), X),
    "one of channels": (lambda m, x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6), X),
    "one of pixels": (lambda m, x: x / torch.sqrt((x * x).mean((2, 3), keepdim=True) + 1e-6), X),
    "one of all": (lambda m, x: x * torch.rsqrt(x.pow(2).mean() + 1e-6), X),
    "one by a sum": (lambda m, x: x / torch.sqrt((x * x).sum(1, keepdim=True) / 3 + 1e-6), X),
    "a norm of two dimensions": (lambda m, x: F.rms_norm(x, x.shape[2:]), X),
    "one by the deviation": (lambda m, x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), X),
    "averages with a padding": (lambda m, x: F.avg_pool2d(x, 3, 2, 1), X),
    "maxima, sizes up": (lambda m, x: F.max_pool2d(x, 3, 2, ceil_mode=True), X),
    "nearest by a factor": (resized(scale_factor=2, mode="nearest"), X),
    "nearest of one pixel": (resized(size=(42, 6), mode="nearest"), X),
}


@dataclasses.dataclass(frozen=True)
class Exported:
    """Functions that were exported at once, each of an input of its own, and taken apart again."""

    model: nn.Module
    """It has recurrent layers at hand."""
    files: dict[str, bytes]


def exported(cases: dict[str, tuple[Function, Tensor]]) -> Exported:
    torch.manual_seed(0)
    layers = {"lstm": nn.LSTM(6, 5, 2, bidirectional=True), "gru": nn.GRU(6, 5, 2, batch_first=True)}
    functions, inputs = [f for f, _ in cases.values()], tuple(x.clone() for _, x in cases.values())
    model = Model(lambda m, *xs: [f(m, x) for f, x in zip(functions, xs, strict=True)], **layers).eval()
    program: Any = torch.onnx.export(model, inputs, dynamo=True, verbose=False)
    with torch.no_grad():
        counts = [len(found) if isinstance(found, tuple) else 1 for found in model(*inputs)]
    return Exported(model, dict(zip(cases, parts_of(program.model, counts), strict=True)))


@pytest.fixture(scope="module")
def known() -> Exported:
    return exported(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_is_computed_as_pytorch_computes_it(name: str, known: Exported) -> None:
    (function, x), file = KNOWN[name], known.files[name]
    assert first_unknown(file, half=False) is None
    with torch.no_grad():
        expected = function(known.model, x)
    found = OpenVinoRunner(file, OpenVinoOptions(precision="f32"))(x.clone().numpy())
    for mine, its in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), its, rtol=1e-4, atol=1e-5)


UNKNOWN: dict[str, tuple[Function, str]] = {
    "antialiasing": (
        resized(size=(5, 4), mode="bilinear", antialias=True),
        r"\(Interpolate\)",
    ),
    "nearest by no whole factor": (resized(size=(16, 6), mode="nearest"), r"\(Interpolate\)"),
    "nearest of fewer pixels": (resized(size=(4, 6), mode="nearest"), r"\(Interpolate\)"),
    "nearest 41 times": (resized(size=(14, 246), mode="nearest"), r"\(Interpolate\)"),
    "averages beyond the padding": (
        lambda m, x: F.avg_pool2d(x, 5, 4, 2, ceil_mode=True),
        r"\(AvgPool\)",
    ),
    "maxima of nothing": (lambda m, x: F.max_pool2d(x, 3, 5, 1, ceil_mode=True), r"\(MaxPool\)"),
    "a floor": (lambda m, x: torch.floor(x), r"\(Floor\)"),
}


@pytest.fixture(scope="module")
def unknown() -> Exported:
    return exported({name: (function, X) for name, (function, _) in UNKNOWN.items()})


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_openvino_may_compute_otherwise_is_not_known(name: str, unknown: Exported) -> None:
    found = first_unknown(unknown.files[name], half=False)
    assert found is not None
    assert re.search(UNKNOWN[name][1], found)


def test_an_output_has_the_files_name_where_openvino_finds_another_for_it() -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    deviation = Model(lambda m, x: x.std(-1, keepdim=True)).eval()
    names: dict[str, Any] = {"io": None, "target": "openvino", "input_names": ["x"], "output_names": ["y"]}
    model = to_onnx(program_of(deviation, x), **names, dims=({},))
    runner = OpenVinoRunner(onnx_ir.to_proto(model).SerializeToString(), OpenVinoOptions(precision="f32"))
    assert [info.name for info in runner.outputs] == ["y"]
    torch.testing.assert_close(torch.from_numpy(runner(x.numpy())[0]), deviation(x))
