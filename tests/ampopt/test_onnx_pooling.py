"""Max pooling's places in ONNX Runtime: constants are folded, unpooling is one operator, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.onnx_session import OnnxRunner, SessionOptions
from ampopt.passes import onnx_runtime
from tests.helpers import Model, Unpooling, program_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def models(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """The program as an ONNX model, without and with its pooling operators."""
    program = program_of(model.eval(), x)
    after = onnx_runtime._as_onnx(program, (x,))
    monkeypatch.setattr(onnx_runtime, "use_pooling_operators", lambda model: None)
    return onnx_runtime._as_onnx(program, (x,)), after


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
