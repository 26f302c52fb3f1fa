"""Interpolations by a factor have PyTorch's sizes in ONNX Runtime, whatever float32 makes of the factor."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ampopt.engines.onnx_graph import OPSETS, model_of
from ampopt.errors import ExportError
from ampopt.ir.resize_forms import fitting_factor
from ampopt.ort.session import OnnxRunner, SessionOptions
from tests.helpers import Model, program_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SIZES = ((0.7, 20), (0.7, 90), (0.29, 100), (1.15, 20), (2.0, 17))

FACTORS = (0.29, 0.35, 0.57, 0.7, 1.15, 1.3, 1.4, 0.5, 2.0, 1 / 3)


@pytest.mark.parametrize("factor", FACTORS)
def test_there_is_a_factor_for_every_size(factor: float) -> None:
    for size in range(1, 2049):
        found = fitting_factor(factor, size)
        assert found is not None
        assert abs(found / factor - 1) < 2e-6
        assert math.floor(size * found) == math.floor(size * factor)


BETWEEN = [(mode, factor, size) for mode in ("bilinear", "bicubic") for factor, size in SIZES]


@pytest.mark.parametrize(("mode", "factor", "size"), [*BETWEEN, ("nearest", 2.0, 17)])
def test_an_image_has_pytorchs_size_and_pixels(mode: str, factor: float, size: int) -> None:
    import onnx_ir

    x = torch.randn(1, 2, size, 30)
    corners = None if mode == "nearest" else False
    model = Model(lambda m, v: F.interpolate(v, scale_factor=factor, mode=mode, align_corners=corners))
    graph = program_of(model, x).graph
    data = onnx_ir.to_proto(model_of(graph, (x,), OPSETS["onnxruntime"], ["x"], ["y"], ({},)))
    (found,) = OnnxRunner(data.SerializeToString(), SessionOptions())(x.numpy())
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("factor", "dim", "is_refused"), [(0.7, 2, True), (0.7, 0, False), (2.0, 2, False)])
def test_sizes_that_vary_have_a_factor_that_fits_them_all_or_no_model(
    factor: float, dim: int, is_refused: bool
) -> None:
    x = torch.randn(2, 2, 40, 40)
    graph = program_of(Model(lambda m, v: F.interpolate(v, scale_factor=factor)), x).graph

    def export() -> object:
        return model_of(graph, (x,), OPSETS["onnxruntime"], ["x"], ["y"], ({dim: "size"},))

    if is_refused:
        with pytest.raises(ExportError, match=r"an interpolation by 0\.7 has other sizes there"):
            export()
    else:
        assert export() is not None
