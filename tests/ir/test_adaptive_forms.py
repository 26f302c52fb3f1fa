"""Poolings to a size have PyTorch's windows in ONNX files, whatever the size of the image; means keep NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.errors import ExportError
from ampopt.ir.adaptive_forms import maxima_of_windows, means_of_windows
from tests.helpers import Model
from tests.support.exporting import export, run

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(1, 4, 16, 24)
DYNAMIC = {"inputs_0": {2: "height", 3: "width"}}
SIZES = ((16, 24), (9, 13), (17, 40), (12, 12), (2, 7), (1, 1))

POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "means": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "maxima": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "means of tiles": lambda x: F.adaptive_avg_pool2d(x, (None, 4)),
    "maxima of tiles": lambda x: F.adaptive_max_pool2d(x, (4, 1)),
    "means of a row": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 5),
    "maxima of a row": lambda x: F.adaptive_max_pool1d(x.flatten(2), 5),
    "means of a volume": lambda x: F.adaptive_avg_pool3d(x[None], (2, None, 5)),
    "maxima of a volume": lambda x: F.adaptive_max_pool3d(x[None], (2, 3, 5)),
    "one row of means": lambda x: F.adaptive_avg_pool2d(x, (1, None)),
    "half as many means": lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2 + 1, None)),
    "more means than pixels": lambda x: F.adaptive_avg_pool2d(x, (None, 30)),
    "means of an image": lambda x: F.adaptive_avg_pool2d(x[0], (3, None)),
    "all pixels": lambda x: F.adaptive_avg_pool2d(x, 1),
    "the largest pixel": lambda x: F.adaptive_max_pool2d(x, 1),
    "the largest of a row": lambda x: F.adaptive_max_pool1d(x.flatten(2), 1),
    "the largest of a volume": lambda x: F.adaptive_max_pool3d(x[None], 1),
    "place of the largest": lambda x: F.adaptive_max_pool2d(x, 1, return_indices=True)[1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_windows_are_pytorchs_at_every_size(dtype: torch.dtype, tmp_path: Path) -> None:
    poolings = POOLINGS
    if dtype is torch.float16:  # the form of a kind is the same for any number of windows
        poolings = {name: POOLINGS[name] for name in ("means", "maxima of tiles")}

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(pooling(x) for pooling in poolings.values())

    path = tmp_path / "m.onnx"
    export(Model(lambda m, x: forward(x)), path, X.to(dtype), dynamic=DYNAMIC)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (taken,) = (given.name for given in session.get_inputs())
    for height, width in SIZES:
        x = torch.randn(1, 4, height, width)
        x[0, 1, 0, 0], x[0, 2] = torch.inf, -torch.inf
        spoilt = x.clone()
        spoilt[0, 0, height // 2, width // 2] = torch.nan
        limit = 1e-5 if dtype is torch.float32 else 2e-3
        for given in (x.to(dtype), spoilt.to(dtype)):
            results = session.run(None, {taken: given.numpy()})
            for name, found, expected in zip(poolings, results, forward(given), strict=True):
                if "mean" in name or given.isnan().sum() == 0:  # ONNX Runtime's maxima lose NaN
                    torch.testing.assert_close(
                        torch.from_numpy(found), expected, rtol=limit, atol=limit, equal_nan=True, msg=name
                    )


OF_ONE_SIZE = ("maxima", "maxima of tiles", "maxima of a row", "means of a volume", "maxima of a volume")


def test_windows_of_an_image_of_one_size_are_pytorchs(tmp_path: Path) -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(POOLINGS[name](x) for name in OF_ONE_SIZE)

    x = torch.randn(1, 4, 17, 23)
    export(Model(lambda m, x: forward(x)), tmp_path / "m.onnx", x)
    for name, found, expected in zip(
        OF_ONE_SIZE, run(tmp_path / "m.onnx", 2 * x), forward(2 * x), strict=True
    ):
        torch.testing.assert_close(torch.from_numpy(found), expected, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("size", range(1, 40))
def test_every_number_of_windows(size: int) -> None:
    row = torch.randn(2, size, dtype=torch.float64)
    for count in range(1, 25):
        torch.testing.assert_close(means_of_windows(row, [count]), F.adaptive_avg_pool1d(row, count))
        assert maxima_of_windows(row, [count]).equal(F.adaptive_max_pool1d(row, count))


def test_places_of_maxima_are_refused_where_sizes_vary(tmp_path: Path) -> None:
    def places(_: object, x: Tensor) -> Tensor:
        return F.adaptive_max_pool2d(x, (3, 2), return_indices=True)[1]

    with pytest.raises(
        ExportError, match=r"tells places, and sizes vary: adaptive_max_pool2d \(\w+.py:\d+\)"
    ):
        export(Model(places), tmp_path / "m.onnx", X, dynamic=DYNAMIC)
