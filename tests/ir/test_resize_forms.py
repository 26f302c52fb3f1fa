"""Interpolations have PyTorch's sizes and pixels in runtimes, whatever float32 makes of a factor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.engines.onnx_graph import OPSETS, model_of
from ampopt.engines.onnx_program import plain_model
from ampopt.errors import ExportError
from ampopt.ir.resize_forms import BY_NUMBER, fitting_factor
from ampopt.ir.stable_forms import with_forms
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner
from ampopt.ort.session import OnnxRunner, SessionOptions
from tests.helpers import Model, program_of
from tests.support.side_by_side import parts_of, side_by_side

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
    x = torch.randn(1, 2, size, 30)
    corners = None if mode == "nearest" else False
    model = Model(lambda m, v: F.interpolate(v, scale_factor=factor, mode=mode, align_corners=corners))
    graph = program_of(model, x).graph
    data = onnx_ir.to_proto(model_of(graph, (x,), OPSETS["onnxruntime"], ["x"], ["y"], ({},)))
    (found,) = OnnxRunner(data.SerializeToString(), SessionOptions())(x.numpy())
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-4, atol=1e-4)


RESIZINGS: dict[str, dict[str, Any]] = {
    "by a factor": {"scale_factor": 1.2},
    "to fewer by a factor": {"scale_factor": 0.6},
    "by a whole factor": {"scale_factor": (41.0, 3.0)},
    "by an exact size": {"scale_factor": 2.4, "recompute_scale_factor": True},
    "to a size": {"size": (12, 36)},
    "to fewer": {"size": (7, 1)},
    "in one dimension": {"size": (20, 36)},
}


NEAREST: dict[str, Callable[[Tensor], Tensor]] = {
    f"{mode}, {name}": functools.partial(F.interpolate, mode=mode, **options)
    for mode in ("nearest", "nearest-exact")
    for name, options in RESIZINGS.items()
}


@pytest.fixture(scope="module")
def nearest() -> dict[str, bytes]:
    """The file of each, all of which were exported at once."""
    images = tuple(torch.zeros(1, 1, 20, 30) for _ in NEAREST)
    data = plain_model(program_of(side_by_side(NEAREST), *images).graph, images)
    model = onnx_ir.from_proto(onnx.load_from_string(data))
    return dict(zip(NEAREST, parts_of(model, [1] * len(NEAREST)), strict=True))


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("resizing", NEAREST)
def test_the_nearest_pixels_are_pytorchs(resizing: str, runtime: str, nearest: dict[str, bytes]) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino")
    x, data = torch.arange(600.0).view(1, 1, 20, 30), nearest[resizing]
    runner = (
        OnnxRunner(data, SessionOptions())
        if runtime == "onnxruntime"
        else OpenVinoRunner(data, OpenVinoOptions())
    )
    (found,) = runner(x.numpy())
    assert torch.equal(torch.from_numpy(found), NEAREST[resizing](x))


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_and_volumes_have_pytorchs_nearest_pixels(dims: int, dtype: torch.dtype) -> None:
    x = torch.arange(20.0**dims).remainder(2048).to(dtype).view(1, 1, *[20] * dims)
    model = Model(lambda m, v: F.interpolate(v, scale_factor=1.2))
    (found,) = OnnxRunner(plain_model(program_of(model, x).graph, (x,)), SessionOptions())(x.numpy())
    assert torch.equal(torch.from_numpy(found), model(x))


def test_pixels_that_are_repeated_stay_one_operator() -> None:
    x = torch.randn(1, 2, 20, 30)
    model = Model(lambda m, v: F.interpolate(v, scale_factor=2.0))
    nodes = onnx.load_from_string(plain_model(program_of(model, x).graph, (x,))).graph.node
    assert [node.op_type for node in nodes] == ["Resize"]


@pytest.mark.parametrize("factor", [1.2, 41.0])
def test_sizes_that_vary_have_pytorchs_nearest_pixels_or_no_model(factor: float) -> None:
    x = torch.randn(2, 2, 40, 40)
    graph = program_of(Model(lambda m, v: F.interpolate(v, scale_factor=factor)), x).graph
    with pytest.raises(ExportError, match=rf"an interpolation by {factor} has other (sizes|pixels) there"):
        model_of(graph, (x,), OPSETS["onnxruntime"], ["x"], ["y"], ({2: "size"},))


@pytest.mark.parametrize(
    ("factor", "dim", "is_refused"),
    [(0.7, 2, True), (0.7, 0, False), (2.0, 2, False), (0.5, 2, False), (1.5, 2, False)],
)
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


def test_numbers_of_pixels_are_where_the_image_is() -> None:
    """They were on the CPU for a program on a GPU, and could not be taken by them there."""
    program = program_of(Model(lambda m, v: F.interpolate(v, scale_factor=1.2)), torch.randn(1, 2, 20, 30))
    image = torch.empty(1, 2, 20, 30, device="meta")
    stable = with_forms(program.graph, (image,), BY_NUMBER)
    assert {constant.device.type for constant in stable.buffers()} == {"meta"}
    assert stable(image)[0].shape == (1, 2, 24, 36)
