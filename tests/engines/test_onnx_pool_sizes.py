"""Poolings whose sizes are rounded up are PyTorch's in ONNX Runtime and in OpenVINO."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.engines.executable import executable
from ampopt.passes import OnnxRuntime, Openvino
from tests.helpers import program_of
from tests.support.side_by_side import results_by_name, side_by_side

pytest.importorskip("onnxscript")

IMAGE = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(0))
ROWS, VOLUME = IMAGE[0], IMAGE[:1, None, :, :8, :9].contiguous()

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "averages of the padding": (lambda x: F.avg_pool2d(x, 5, 4, 2, ceil_mode=True), IMAGE),
    "averages of one dimension's": (lambda x: F.avg_pool2d(x, (3, 5), (4, 3), (1, 0), ceil_mode=True), IMAGE),
    "averages without it": (
        lambda x: F.avg_pool2d(x, 5, 4, 2, ceil_mode=True, count_include_pad=False),
        IMAGE,
    ),
    "averages that need no window more": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), IMAGE),
    "averages of rows": (lambda x: F.avg_pool1d(x, 4, 3, 2, ceil_mode=True), ROWS),
    "averages of volumes": (lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True), VOLUME),
    "averages with a divisor": (
        lambda x: F.avg_pool2d(x, 5, 4, 2, ceil_mode=True, divisor_override=3),
        IMAGE,
    ),
    "maxima": (lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), IMAGE),
    "maxima without a last window": (lambda x: F.max_pool2d(x, 2, 3, ceil_mode=True), IMAGE),
    "maxima with one in one dimension": (lambda x: F.max_pool2d(x[..., :10], 2, 3, ceil_mode=True), IMAGE),
    "maxima of volumes": (lambda x: F.max_pool3d(x, 3, 5, 1, ceil_mode=True), VOLUME),
    "maxima of distant pixels": (lambda x: F.max_pool2d(x, 3, 5, 1, 2, ceil_mode=True), IMAGE),
}
PLACES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "places without a last window": (
        lambda x: F.max_pool2d(x, 2, 3, ceil_mode=True, return_indices=True),
        IMAGE,
    ),
    "places with one in one dimension": (
        lambda x: F.max_pool2d(x[..., :10], 2, 3, ceil_mode=True, return_indices=True),
        IMAGE,
    ),
    "places beyond a padding": (
        lambda x: F.max_pool2d(x, 3, 5, 1, ceil_mode=True, return_indices=True),
        IMAGE,
    ),
}
"""Maxima with their places, which OpenVINO gives other ones of."""


def spoilt(x: Tensor) -> Tensor:
    changed = x.clone()
    changed.view(-1)[40] = math.nan
    return changed


@pytest.mark.parametrize(
    ("engine", "table"),
    [(OnnxRuntime(session=()), {**FUNCTIONS, **PLACES}), (Openvino(options=()), FUNCTIONS)],
    ids=["onnxruntime", "openvino"],
)
def test_engines_compute_what_eager_does(
    engine: Any, table: dict[str, tuple[Callable[[Tensor], Any], Tensor]]
) -> None:
    for package in engine.packages:
        pytest.importorskip(package)
    functions = {name: function for name, (function, _) in table.items()}
    images = [x.clone() for _, x in table.values()]
    applied = engine.apply(program_of(side_by_side(functions), *images))
    assert applied.rewrites == 1
    run = executable(applied.program)
    for given in (images, [x - 100 for x in images], [spoilt(x) for x in images]):
        for name, mine, its in results_by_name(functions, given, run(*given)):
            torch.testing.assert_close(
                mine, its, rtol=1e-5, atol=1e-5, equal_nan=True, msg=f"{name}: {{}}".format
            )
