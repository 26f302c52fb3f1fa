"""The operator `ampopt::fused_conv`: its tiles as text, its result without data, what it stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.kernels.fused_conv import (
    ACTIVATIONS,
    Tile,
    combine_block,
    fused_conv,
    is_available,
    load_ahead,
    reference,
)

DEPTHWISE, VECTOR = "depthwise:8:16:1:1:4:1:ieee", "vector:1:8:32:1:4:1:ieee"
SPLIT = "dense:16:16:16:3:4:2:ieee"
GEOMETRY = [2, 1, 1, 0, 1, 2]


@pytest.mark.parametrize("text", [DEPTHWISE, VECTOR, SPLIT, "dense:128:64:32:1:4:3:tf32"])
def test_a_tile_is_its_text(text: str) -> None:
    assert str(Tile.parse(text)) == text


def test_a_tile_keeps_each_number_in_its_place() -> None:
    assert Tile.parse("dense:128:64:32:4:8:3:tf32") == Tile("dense", 128, 64, 32, 4, 8, 3, "tf32")


@pytest.mark.parametrize("text", ["", "dense", "dense:16:16:16:1:4:2", "dense:a:16:16:1:4:2:ieee"])
def test_what_is_no_tile_is_no_tile(text: str) -> None:
    with pytest.raises(ValueError, match=r"not enough values|invalid literal"):
        Tile.parse(text)


def test_a_block_of_sums_is_as_wide_as_the_channels_up_to_a_limit() -> None:
    assert combine_block(20) == (8, 32, 4)
    assert combine_block(512) == (8, 128, 8)
    assert combine_block(1) == (8, 1, 1)


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, w, b, z, s of a convolution of two groups."""
    shapes = [(2, 8, 7, 9), (6, 4, 3, 3), (6,), (2, 6, 4, 5), (2, 8, 1, 1)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("act1", ACTIVATIONS)
def test_the_reference_is_the_formula(act1: str) -> None:
    x, w, b, z, s = operands(torch.float64)
    y = F.conv2d(x * s, w, b, (2, 1), (1, 0), (1, 2), 2)
    act: dict[str, Callable[[Tensor], Tensor]] = {
        "": lambda v: v,
        "relu": lambda v: v.clamp(min=0),
        "relu6": lambda v: v.clamp(0, 6),
        "sigmoid": lambda v: 1 / (1 + (-v).exp()),
        "silu": lambda v: v / (1 + (-v).exp()),
        "hardsigmoid": lambda v: (v / 6 + 0.5).clamp(0, 1),
        "hardswish": lambda v: v * (v / 6 + 0.5).clamp(0, 1),
        "gelu": lambda v: v / 2 * (1 + torch.erf(v / 2**0.5)),
        "gelu_tanh": lambda v: v / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3))),
    }
    expected = (act[act1](y) + z).clamp(min=0)
    assert torch.allclose(reference(x, w, b, z, s, GEOMETRY, 2, act1, "relu"), expected, atol=1e-12)


def test_without_an_addend_there_is_no_second_activation() -> None:
    x, w, *_ = operands()
    found = reference(x, w, None, None, None, GEOMETRY, 2, "", "relu")
    assert torch.equal(found, F.conv2d(x, w, None, (2, 1), (1, 0), (1, 2), 2))


def test_without_a_geometry_it_is_a_linear_layer() -> None:
    x, w, b = torch.randn(2, 5, 8), torch.randn(3, 8), torch.randn(3)
    assert torch.equal(reference(x, w, b, None, None, [], 1, "relu", ""), F.linear(x, w, b).relu())
    fake = fused_conv()(x.to("meta"), w.to("meta"), None, None, None, [], 1, "", "", VECTOR)
    assert (fake.shape, fake.stride(), fake.dtype) == ((2, 5, 3), (15, 3, 1), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_without_data_the_result_has_its_kind_with_the_channels_innermost(dtype: torch.dtype) -> None:
    x, w, b, z, s = (t.to("meta", dtype) for t in operands())
    fake = fused_conv()(x, w, b, z, s, GEOMETRY, 2, "relu", "", SPLIT)
    assert (fake.shape, fake.dtype, fake.device.type) == (z.shape, dtype, "meta")
    assert fake.is_contiguous(memory_format=torch.channels_last)


def test_the_operator_is_registered_once() -> None:
    assert fused_conv() is fused_conv()
    assert fused_conv() is torch.ops.ampopt.fused_conv.default


def test_it_is_there_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", asked.append)
    assert not is_available()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert is_available()
    assert asked == ["triton"]


@pytest.mark.gpu
def test_triton_is_loaded_ahead_without_anything_on_the_gpu() -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    before = torch.cuda.memory_allocated()
    load_ahead(torch.device("cuda"))
    assert cache.triton_key.cache_info().currsize == 1
    assert torch.cuda.memory_allocated() == before
