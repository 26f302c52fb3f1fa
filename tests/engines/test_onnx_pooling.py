"""Max pooling's places in ONNX Runtime: constants are folded, unpooling is one operator, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.engines import onnx_pooling, onnx_program
from ampopt.engines.onnx_program import for_onnx_runtime, plain_model
from ampopt.ort.session import OnnxRunner, SessionOptions
from tests.helpers import Model, Unpooling, program_of, with_pixel

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def models(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """The program as an ONNX model, without and with its pooling operators."""
    import onnx_ir

    whole, without = onnx_pooling.use_pooling_operators, list[bytes]()

    def keep_and_apply(model: Any) -> None:
        without.append(onnx_ir.to_proto(model).SerializeToString())
        whole(model)

    monkeypatch.setattr(onnx_program, "use_pooling_operators", keep_and_apply)
    after = for_onnx_runtime(plain_model(program_of(model.eval(), x).graph, (x,)))
    return without[0], after


def operators(model: bytes) -> Counter[str]:
    import onnx

    return Counter(node.op_type for node in onnx.load_from_string(model).graph.node)


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (2, 3, 10, 6)])
def test_unpooling_is_one_operator_and_first_places_are_constants(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = models(Unpooling(), torch.randn(shape), monkeypatch)
    assert operators(before)["ScatterND"]
    assert operators(before)["Slice"]
    found = operators(after)
    assert found["MaxUnpool"] == operators(before)["ScatterND"]
    assert found["ScatterND"] == found["Slice"] == 0
    old, new = (OnnxRunner(model, SessionOptions()) for model in (before, after))
    for _ in range(3):
        x = torch.randn(shape).round(decimals=1).numpy()  # with ties
        assert all((a == b).all() for a, b in zip(old(x), new(x), strict=True))


SCATTERS: dict[str, Callable[[Any, Tensor], object]] = {
    "places that may be negative": lambda m, x: torch.zeros(64).index_put(
        (m.pool(x)[1].flatten() - 1,), torch.ones(16)
    ),
    "places that may be too large": lambda m, x: torch.zeros(65).index_put(
        (m.pool(x)[1].flatten() + 1,), torch.ones(16)
    ),
    "no zeros": lambda m, x: torch.ones(64).index_put((m.pool(x)[1].flatten(),), torch.ones(16)),
    "added": lambda m, x: torch.zeros(64).index_put(
        (m.pool(x)[1].flatten(),), torch.ones(16), accumulate=True
    ),
    "of other integers": lambda m, x: torch.zeros(64).index_put(
        (x.flatten()[:16].abs().clamp(max=9).long(),), torch.ones(16)
    ),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_other_scatterings_stay_or_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(SCATTERS[name], pool=nn.MaxPool2d(2, return_indices=True))
    x = torch.randn(1, 1, 8, 8)
    before, after = models(model, x, monkeypatch)
    if name != "places that may be too large":  # 65 numbers have room for all of them
        assert operators(after)["MaxUnpool"] == 0
    old, new = (OnnxRunner(each, SessionOptions())(x.numpy())[0] for each in (before, after))
    assert (old == new).all()
    assert torch.allclose(torch.from_numpy(new), model(x))


BLOWN: dict[str, Callable[[Any, Tensor], Any]] = {
    "windows that overlap": lambda m, x: F.max_pool2d(m.conv(x).relu(), 3, 2, 1),
    "of a sum": lambda m, x: F.max_pool2d(m.conv(x) + x, 2),
    "of the input": lambda m, x: F.max_pool2d(x, 2),
    "rounded up": lambda m, x: F.max_pool2d(m.conv(x), 3, 2, ceil_mode=True),
    "with pixels left over": lambda m, x: F.max_pool2d(m.conv(x), 3, 3),
    "dilated": lambda m, x: F.max_pool2d(m.conv(x), 2, 1, dilation=2),
    "one window": lambda m, x: F.adaptive_max_pool2d(x, 1),
    "of lines": lambda m, x: F.max_pool1d(m.conv(x).flatten(2), 3),
    "largest of channels": lambda m, x: m.conv(x).amax(1),
    "smallest of pixels": lambda m, x: x.amin((2, 3), keepdim=True),
    "with places": lambda m, x: F.max_pool2d(m.conv(x), 2, return_indices=True)[0],
    "padded with infinities": lambda m, x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-torch.inf), 3, 2),
    "masked": lambda m, x: m.conv(x).masked_fill(x > 0.5, -torch.inf).amax((2, 3)),
}


@pytest.mark.parametrize("name", BLOWN)
def test_maxima_keep_nan_and_are_what_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(BLOWN[name], conv=nn.Conv2d(8, 8, 3, padding=1)), torch.randn(1, 8, 12, 10)
    before, after = (OnnxRunner(each, SessionOptions()) for each in models(model, x, monkeypatch))
    assert (before(x.numpy())[0] == after(x.numpy())[0]).all()
    for value in (float("nan"), float("inf")):
        spoilt = with_pixel(x, value)
        spoilt[0, :, -3, 4] = value
        lost = torch.isfinite(torch.from_numpy(after(spoilt.numpy())[0])) & ~torch.isfinite(model(spoilt))
        assert not lost.any()


def pooled(*arguments: Any, **options: Any) -> Callable[[Any, Tensor], Any]:
    return lambda m, x: F.max_pool2d(x.relu(), *arguments, return_indices=True, **options)


PLACES: dict[str, Callable[[Any, Tensor], Any]] = {
    "tiles": pooled(2),
    "windows that overlap": pooled(3, 2, 1),
    "dilated": pooled(2, 1, dilation=2),
    "rounded up": pooled(3, 2, ceil_mode=True),
    "with pixels left over": pooled(5, 5),
    "single pixels": pooled(1, 2),
    "of lines": lambda m, x: F.max_pool1d(x.flatten(2), 3, 2, 1, return_indices=True),
    "unpooled": lambda m, x: m.unpool(*pooled(2)(m, x)),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_place_of_a_window_with_nan_is_that_of_its_last(name: str) -> None:
    model, x = Model(PLACES[name], unpool=nn.MaxUnpool2d(2)), torch.randn(2, 3, 12, 10)
    runner = OnnxRunner(for_onnx_runtime(plain_model(program_of(model, x).graph, (x,))), SessionOptions())
    for faults in (0, 1, 2, 7, 40):
        spoilt = x.clone()
        spoilt.view(-1)[torch.randperm(x.numel())[:faults]] = float("nan")
        wanted = model(spoilt)
        rights = wanted if isinstance(wanted, tuple) else (wanted,)
        for found, right in zip(runner(spoilt.numpy()), rights, strict=True):
            assert torch.equal(torch.from_numpy(found).nan_to_num(77.0), right.nan_to_num(77.0))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.max_pool2d(x + m.bias, 2),
        lambda m, x: F.max_pool2d(x.clamp(max=6.0), 2),
        lambda m, x: F.max_pool2d(x * 2, 2),
        lambda m, x: F.max_pool2d(F.leaky_relu(x), 2),
        lambda m, x: F.max_pool2d(x, 2),
    ],
)
def test_a_mask_of_infinities_masks(function: Callable[[Any, Tensor], Tensor]) -> None:
    """Examples have none, and a window beside masked pixels is what it is of the others."""
    model, x = Model(function, bias=torch.zeros(8, 1, 1)), torch.randn(1, 8, 12, 10)
    runner = OnnxRunner(for_onnx_runtime(plain_model(program_of(model, x).graph, (x,))), SessionOptions())
    masked = x.clone()
    masked[..., ::2] = -torch.inf
    assert torch.equal(torch.from_numpy(runner(masked.numpy())[0]), model(masked))
