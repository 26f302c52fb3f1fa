"""Angles and samples of images in ONNX Runtime are eager's for -0, infinities and places far outside."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.engines.onnx_program import for_onnx_runtime, plain_model
from ampopt.ort.session import OnnxRunner, SessionOptions
from tests.helpers import Model, program_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

NUMBERS = torch.tensor(
    [
        *(0.0, -0.0, 1.0, -1.0, 0.3, -0.3, 1e-20, -1e-20, 3e18, -3e18, math.inf, -math.inf),
        *(1e38, -3.4e38, 2e-38, -1.2e-38),
    ]
)
PAIRS = torch.cartesian_prod(NUMBERS, NUMBERS)


def run_all(model: Model, *tensors: Tensor) -> list[Tensor]:
    """The model in ONNX Runtime, exported with ordinary numbers of these sizes."""
    generator = torch.Generator().manual_seed(0)
    examples = tuple(torch.randn(tensor.shape, generator=generator) for tensor in tensors)
    program = program_of(model, *examples)
    runner = OnnxRunner(for_onnx_runtime(plain_model(program.graph, examples)), SessionOptions())
    return [torch.from_numpy(array) for array in runner(*[tensor.numpy() for tensor in tensors])]


def run(model: Model, *tensors: Tensor) -> Tensor:
    (found,) = run_all(model, *tensors)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_angle_is_in_its_quadrant_whatever_the_sign_of_zero(dtype: torch.dtype) -> None:
    y, x = (each.clamp(-6e4, 6e4) if dtype is torch.float16 else each for each in PAIRS.unbind(1))
    y, x = (torch.cat([each, torch.tensor([math.nan, 1.0])]) for each in (y, x))
    model = Model(lambda m, y, x: torch.atan2(y.to(dtype), x.to(dtype)).float())
    error = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(run(model, y, x), model(y, x), rtol=error, atol=error, equal_nan=True)


def test_signs_and_numbers_beside_nan_are_pytorchs() -> None:
    numbers = torch.cat([NUMBERS, torch.tensor([math.nan])])
    signs = Model(lambda m, a, b: (torch.copysign(a, b), torch.copysign(a, -0.0), torch.copysign(a, 2)))
    beside_nan = Model(lambda m, a, b: (torch.fmax(a, b), torch.fmin(a, b)))
    for model, others in ((signs, NUMBERS), (beside_nan, numbers)):
        a, b = torch.cartesian_prod(numbers, others).unbind(1)
        for found, expected in zip(run_all(model, a, b), model(a, b), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            if model is signs:
                is_number = ~expected.isnan()
                assert torch.equal(found.signbit()[is_number], expected.signbit()[is_number])


def test_a_length_is_right_where_squares_are_not() -> None:
    a, b = torch.cartesian_prod(torch.cat([NUMBERS, torch.tensor([math.nan])]), NUMBERS).unbind(1)
    model = Model(lambda m, a, b: torch.hypot(a, b))
    torch.testing.assert_close(run(model, a, b), model(a, b), rtol=1e-6, atol=0, equal_nan=True)


def test_a_length_of_half_precision_is_right_down_to_nothing() -> None:
    x = torch.tensor([0.0, 6e-8, 3e-5, 1.0, 200.0])
    model = Model(lambda m, x: torch.hypot(x.half(), x.half()).float())
    torch.testing.assert_close(run(model, x), model(x), rtol=2e-3, atol=6e-8)


def test_an_angle_of_integers_is_a_number() -> None:
    model = Model(lambda m, y, x: torch.atan2(y.int(), x.int()))
    y, x = torch.cartesian_prod(torch.arange(-3.0, 4), torch.arange(-3.0, 4)).unbind(1)
    torch.testing.assert_close(run(model, y, x), model(y, x))


FAR = torch.tensor(
    [0.0, 0.4, -1.0, 1.0, 1.3, -2.9, 9.9, 11.0, -11.0, 3e9, -3e9, 1e30, -1e30, math.inf, -math.inf]
)


WAYS = [*itertools.product(["nearest", "bilinear", "bicubic"], ["zeros", "border"], [False, True])]
"""Mode, padding and `align_corners`."""


@pytest.mark.parametrize("size", [(5, 4), (1, 1)])
def test_a_sample_far_outside_is_zero_or_the_borders(size: tuple[int, int]) -> None:
    image = torch.randn(1, 2, *size, generator=torch.Generator().manual_seed(1))
    grid = torch.cartesian_prod(FAR, FAR).view(1, -1, 1, 2)
    model = Model(lambda m, i, g: tuple(F.grid_sample(i, g, *way) for way in WAYS))
    for way, found, expected in zip(WAYS, run_all(model, image, grid), model(image, grid), strict=True):
        is_finite = grid.isfinite().all(-1).view(1, 1, -1, 1).expand(expected.shape)
        torch.testing.assert_close(
            *(found[is_finite], expected[is_finite]), rtol=1e-4, atol=1e-5, msg=f"{way}: {{}}".format
        )
        if way[0] == "nearest" and size != (1, 1):  # infinity times a width of 0 is NaN
            torch.testing.assert_close(found, expected, msg=f"{way}: {{}}".format)
        assert not (expected.isnan() & found.isfinite()).any(), way


def test_the_nearest_pixel_of_no_place_is_none() -> None:
    image = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    grid = torch.full((1, 3, 1, 2), math.nan)
    model = Model(lambda m, i, g: F.grid_sample(i, g, "nearest", align_corners=False))
    assert torch.equal(run(model, image, grid), model(image, grid))
