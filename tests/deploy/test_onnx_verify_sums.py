"""Files of models that sum up are right in ONNX Runtime's order of adding, too, and wrong ones stay wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.lanes import FP32
from tests.helpers import Model
from tests.support.exporting import export
from tests.support.verifying import verifier_of


def made(seed: int, *shapes: tuple[int, ...], normal: bool = False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn if normal else torch.rand
    return tuple(draw(shape, generator=generator) for shape in shapes)


def with_convolution(kernel: int) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(3, 1, kernel, padding=kernel // 2)


FRAME, SMALL = (1, 3, 240, 320), (1, 1, 64, 96)
LINE = torch.linspace(-1, 1, 1536)[None]

RIGHT: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a mask's area": (lambda m, x: m.conv(x).sigmoid().mean(), made(0, FRAME)),
    "a brightness": (lambda m, x: x.mean() - 0.5, made(0, SMALL)),
    "a difference of means": (lambda m, x, y: x.mean() - y.mean(), made(1, SMALL, SMALL)),
    "a mean of numbers around 0": (lambda m, x: x.mean(), made(13, (1, 4, 32, 48), normal=True)),
    "an overlap": (lambda m, x, y: (x * y).sum() / (x + y - x * y).sum(), made(0, SMALL, SMALL)),
    "a correlation": (
        lambda m, x, y: ((x * y).mean() - x.mean() * y.mean()) / (x.std() * y.std()),
        made(0, SMALL, SMALL),
    ),
    "a variance": (lambda m, x: x.var((2, 3)), made(1, (1, 4, 32, 48), normal=True)),
    "deviations": (lambda m, x, y: x.std() - y.std(), made(0, SMALL, SMALL)),
    "a covariance": (lambda m, x: x.T @ x / 64 - torch.outer(x.mean(0), x.mean(0)), made(0, (64, 8))),
    "distances": (
        lambda m, x, y, z: F.mse_loss(x, y) - F.mse_loss(x, z),
        made(0, SMALL, SMALL, SMALL),
    ),
    "a cosine distance": (
        lambda m, x: 1 - F.cosine_similarity(x, x + 0.01 * x.flip(1), dim=1),
        made(0, (4, 128), normal=True),
    ),
    "an expected place": (
        lambda m, x: F.linear(x.flatten(1).softmax(1), LINE),
        made(0, (1, 1, 32, 48), normal=True),
    ),
    "a running sum": (lambda m, x: x.flatten(1).cumsum(1)[:, -1:], made(2, (1, 4, 32, 48), normal=True)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_file_is_written(tmp_path: Path, name: str) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    function, inputs = RIGHT[name]
    assert export(Model(function, conv=with_convolution(3)), tmp_path / "m.onnx", *inputs).verified


def test_a_model_in_half_precision_may_give_nan_where_the_original_does(tmp_path: Path) -> None:
    """`normalize` adds 1e-12, which is 0 in float16: of inputs of 0 it makes NaN."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    (x,) = made(0, (1, 32, 8, 8), normal=True)
    half = Model(lambda m, x: F.normalize(x, dim=1))
    assert bool(half(torch.zeros_like(x).half()).isnan().all())
    assert export(half, tmp_path / "m.onnx", x.half()).verified


def is_constant(x: Tensor) -> bool:
    return bool((x == x.flatten()[0]).all())


CONV = with_convolution(1)

torch.manual_seed(0)
WIDE = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten())
HEAD = nn.Linear(64 * 28 * 28, 10)
ROUNDED = copy.deepcopy(HEAD).half().float()


def last_of_equal(x: Tensor) -> Tensor:
    """The place of the largest, and of several the last one, as ONNX has it by option."""
    return x.shape[1] - 1 - x.flip(1).argmax(1)


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], tuple[Tensor, ...]]] = {
    "a factor of a deviation": (lambda x: x.std(), lambda x: x.std() * (1 + 3e-5), made(0, SMALL)),
    "a factor of a mean": (lambda x: x.mean() - 0.5, lambda x: x.mean() * (1 + 2e-5) - 0.5, made(0, SMALL)),
    "a row left out": (lambda x: x.mean() - 0.5, lambda x: x[..., 1:, :].mean() - 0.5, made(0, SMALL)),
    "one term too few": (
        lambda x: x.mean() - 0.5,
        lambda x: x.sum() / (x.numel() - 1) - 0.5,
        made(0, SMALL),
    ),
    "an offset": (lambda x: (x - 0.5).mean(), lambda x: (x - 0.5001).mean(), made(0, SMALL)),
    "constant inputs alone": (
        lambda x: CONV(x).sigmoid().mean(),
        lambda x: CONV(x).sigmoid().mean() * (1 + 1e-3 * is_constant(x)),
        made(0, FRAME),
    ),
    "inputs of 0 alone": (
        lambda x: 1 - F.cosine_similarity(x, x + 0.01 * x.flip(1), dim=1),
        lambda x: 1 - F.cosine_similarity(x, x + 0.01 * x.flip(1), dim=1) + 0.5 * (not bool(x.any())),
        made(0, (4, 128), normal=True),
    ),
    "a limit far outside": (
        lambda x: CONV(x).sigmoid().mean(),
        lambda x: CONV(x).clamp(-5, 5).sigmoid().mean(),
        made(0, FRAME),
    ),
    "a head's weights in float16": (
        lambda x: HEAD(WIDE(x)),
        lambda x: ROUNDED(WIDE(x)),
        made(0, (1, 3, 28, 28), normal=True),
    ),
    "the last of equal numbers": (
        lambda x: CONV(x).flatten(1).argmax(1) * 1.0,
        lambda x: last_of_equal(CONV(x).flatten(1)) * 1.0,
        made(0, (1, 3, 32, 32)),
    ),
    "a few terms in float16": (
        lambda x: (x * (x.cumsum(-1) < 0.5)).sum(),
        lambda x: (x.half().float() * (x.cumsum(-1) < 0.5)).sum(),
        made(0, (1, 1, 4, 96)),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_refused(name: str) -> None:
    original, program, (x,) = WRONG[name]
    verifier, _ = verifier_of(Model(lambda _, x: original(x)), x, faults="ignore")
    assert not verifier.check(lambda x: [program(x)], FP32, everywhere=True).passed
    assert verifier.check(lambda x: [original(x)], FP32, everywhere=True).passed


@pytest.mark.parametrize("lanes", [8, 16, 32])
def test_a_difference_of_means_is_right_in_the_order_of_any_processor(lanes: int) -> None:
    for seed in range(5):
        (x,) = made(seed, SMALL)
        verifier, _ = verifier_of(Model(lambda _, x: x.mean() - 0.5), x)

        def in_lanes(x: Tensor) -> list[Tensor]:
            rows = x.numpy().reshape(-1, lanes)
            return [torch.tensor(rows.cumsum(0)[-1].cumsum()[-1] / rows.size) - 0.5]

        assert verifier.check(in_lanes, FP32, everywhere=True).passed
