"""The operators that must work in ONNX, in both precisions."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import Model, with_statistics
from tests.support.exporting import IMAGE, export, run, shapes_of


def test_the_exporter_keeps_nothing_of_what_it_has_exported(tmp_path: Path) -> None:
    export(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten()), tmp_path / "model.onnx", IMAGE)
    gc.collect()
    assert [each for each in gc.get_objects() if type(each).__name__ == "TorchTensor"] == []


def test_a_weight_may_have_the_name_of_a_value(tmp_path: Path) -> None:
    """`EmbeddingBag` is made of operators that the exporter folds, and of a function that has its names."""
    names = ("arange", "view", "index_select", "neg", "val_0", "num_bag")

    def forward(m: Any, i: Tensor) -> tuple[Tensor, ...]:
        return m.bag(i), *(i + getattr(m, name) for name in names)

    bag, weights = nn.EmbeddingBag(9, 4, mode="max"), {name: torch.arange(5) + len(name) for name in names}
    model, i = Model(forward, bag=bag, **weights).eval(), torch.tensor([[1, 3, 8, 0, 2]])
    export(model, tmp_path / "model.onnx", i)
    with torch.no_grad():
        for one, other in zip(run(tmp_path / "model.onnx", i), model(i), strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=1e-6)


def squeeze_excite() -> nn.Module:
    def function(m: Any, x: Tensor) -> Tensor:
        y = F.hardswish(m.conv(x))
        out: Tensor = y * F.hardsigmoid(m.expand(F.relu(m.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return out

    return Model(function, conv=nn.Conv2d(4, 8, 3), squeeze=nn.Conv2d(8, 2, 1), expand=nn.Conv2d(2, 8, 1))


def bilinear(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.conv(x)
    smooth = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True)
    return smooth, F.interpolate(y, size=(9, 7), mode="bilinear", align_corners=False)


def pools(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.conv(x)
    return F.adaptive_avg_pool2d(y, (4, 6)), F.adaptive_max_pool2d(y, (2, 3))


def attention(m: Any, x: Tensor) -> Tensor:
    tokens = m.norm(x.flatten(2).transpose(1, 2))
    out: Tensor = m.attention(tokens, tokens, tokens)[0].softmax(-1)
    return out


CASES: dict[str, Callable[[], nn.Module]] = {
    "conv transpose with groups": lambda: with_statistics(
        nn.Sequential(nn.ConvTranspose2d(4, 8, 3, 2, groups=2, output_padding=1), nn.BatchNorm2d(8))
    ),
    "squeeze and excite": squeeze_excite,
    "bilinear": lambda: Model(bilinear, conv=nn.Conv2d(4, 4, 3)),
    "adaptive pooling": lambda: Model(pools, conv=nn.Conv2d(4, 4, 3, padding=1)),
    "batch norm that stays": lambda: with_statistics(
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    ),
    "layer norm and attention": lambda: Model(
        attention, norm=nn.LayerNorm(4), attention=nn.MultiheadAttention(4, 2, batch_first=True)
    ),
    "group and instance norm": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4)
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_these_operators_are_exported_and_verified(case: str, precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    report = export(CASES[case](), tmp_path / "m.onnx", precision=precision)
    assert report.verified
    assert report.error < (1e-5 if precision == "fp32" else 2e-2)
    assert report.providers == ("CPUExecutionProvider",) or "CPUExecutionProvider" in report.providers
    half = any(
        i.data_type == onnx.TensorProto.FLOAT16 for i in onnx.load(tmp_path / "m.onnx").graph.initializer
    )
    assert half == (precision == "fp16")


def unpooling() -> nn.Module:
    """Two stages down and up, whose indices cross over as in an encoder and decoder."""

    def function(m: Any, x: Tensor) -> Tensor:
        x, first = m.pool(m.stages[0](x))
        x, second = m.pool(m.stages[1](x))
        out: Tensor = m.head(m.stages[3](m.unpool(m.stages[2](m.unpool(x, second)), first)))
        return out

    stages = [(3, 8), (8, 8), (8, 8), (8, 8)]
    layers = [
        nn.Sequential(nn.Conv2d(*widths, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for widths in stages
    ]
    pools = {"pool": nn.MaxPool2d(2, return_indices=True), "unpool": nn.MaxUnpool2d(2)}
    return Model(function, stages=nn.ModuleList(layers), head=nn.Conv2d(8, 1, 1), **pools)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_unpooling_with_indices_is_exported(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "m.onnx"
    report = export(with_statistics(unpooling()), path, IMAGE[:, :, :16, :24], precision=precision)
    assert report.verified
    assert not [n for n in onnx.load(path).graph.node if n.op_type == "BatchNormalization"]


def sums(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = m.conv(x)
    return y.sum(), y.sum((2, 3)), y.prod(1), y.sum(1).relu(), y.cumsum(1), y.var(1), torch.logsumexp(y, 1), y


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_outputs_have_the_dtypes_of_the_model_s(tmp_path: Path, dtype: torch.dtype, precision: str) -> None:
    model, x = Model(sums, conv=nn.Conv2d(3, 8, 3)).eval().to(dtype), IMAGE[:, :, :8, :8].to(dtype)
    export(model, tmp_path / "model.onnx", x, precision=precision)
    found = run(tmp_path / "model.onnx", x)
    assert [each.dtype for each in found] == [each.detach().numpy().dtype for each in model(x)]
    names = list(shapes_of(tmp_path / "model.onnx"))[1:]
    assert names == ["output", *(f"output_{place}" for place in range(1, len(found)))]
