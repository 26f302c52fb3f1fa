"""Copies in float64 of models that make tensors of lower precision by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.in_float64 import AllInFloat64, copy_in_float64
from ampopt.ir.lanes import FP32
from tests.helpers import Model
from tests.support.verifying import verifier_of

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def sampled(m: Any, x: Tensor) -> Any:
    rows = torch.linspace(-1, 1, x.shape[-2], device=x.device)
    grid = torch.stack(torch.meshgrid(rows, rows, indexing="xy"), -1)
    return F.grid_sample(x, grid.expand(x.shape[0], -1, -1, -1) * 0.7, align_corners=False)


def encoded(m: Any, x: Tensor) -> Any:
    places = torch.arange(8, dtype=torch.float32, device=x.device)
    turns = torch.outer(places, 1 / 100 ** (places / 8))
    return torch.matmul(x, torch.cat([turns.sin()[:, :4], turns.cos()[:, :4]], 1))


def attending(m: Any, x: Tensor) -> Any:
    rows = m.linear(x)
    scores = torch.softmax(rows @ rows.transpose(-1, -2), dim=-1, dtype=torch.float32)
    return torch.bmm(scores.flatten(0, 1), x.flatten(0, 1))


def turned(m: Any, x: Tensor) -> Any:
    turns = torch.polar(torch.ones(8, 4), torch.arange(32.0).view(8, 4) / 10)
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    return torch.view_as_real(torch.einsum("bcij,kj->bcik", pairs, turns)).flatten(-2)


def filled(m: Any, x: Tensor) -> Any:
    padded = torch.zeros(2, 3, 10, 10)
    padded[..., 1:-1, 1:-1] = x
    padded.mul_(torch.full((10, 10), 0.3))
    return padded[..., 1:-1, 1:-1] @ m.weight


MODELS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a grid": sampled,
    "an encoding of positions": encoded,
    "a softmax that is asked for float32": attending,
    "complex numbers": turned,
    "a tensor that is written": filled,
    "a cast": lambda m, x: m.linear(x).float() @ m.weight,
    "a constant that is no buffer": lambda m, x: x @ torch.tensor([[0.1] * 8] * 8),
    "a matrix of the model's own, made in half": lambda m, x: x @ torch.full((8, 8), 0.1).half(),
}


@pytest.mark.parametrize("what", MODELS)
def test_what_a_model_makes_in_float32_is_computed_in_float64(what: str) -> None:
    torch.manual_seed(0)
    model = Model(MODELS[what], linear=nn.Linear(8, 8), weight=W.clone()).eval()
    with torch.no_grad():
        exact = copy_in_float64(model)
        with pytest.raises(RuntimeError):
            exact(X.double())
        with AllInFloat64():
            found = exact(X.double())
    assert found.dtype is torch.float64
    if "half" in what:  # no CPU multiplies float32 with half either
        return
    with torch.no_grad():
        own = model(X)
    assert 0 < float((own - found).abs().max()) < 1e-5
    verifier, _ = verifier_of(model, X)
    assert verifier.note is None
    assert 0 < verifier.own_error(FP32) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["a grid", "an encoding of positions", "a cast"])
def test_what_a_model_makes_on_a_gpu_is_computed_in_float64(what: str) -> None:
    torch.manual_seed(0)
    model = Model(MODELS[what], linear=nn.Linear(8, 8), weight=W.clone()).eval().cuda()
    verifier, _ = verifier_of(model, X.cuda())
    assert verifier.note is None
    assert verifier.reference(verifier.draws[0])[0][0].dtype is torch.float64
    assert 0 < verifier.own_error(FP32) < 1e-6


def test_a_result_has_float64s_precision() -> None:
    """A third of each, in float32 or in float64: what is cast on the way does not tell."""
    with torch.no_grad(), AllInFloat64():
        third = (torch.ones(3, dtype=torch.float64) / 3).float().half().bfloat16().to(torch.float32)
        assert torch.equal(third, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_drawn_numbers_are_those_of_float32() -> None:
    torch.manual_seed(3)
    own = torch.randn(5)
    torch.manual_seed(3)
    with AllInFloat64():
        found = torch.randn(5, dtype=torch.float32)
    assert torch.equal(found, own.double())


def test_what_is_written_stays_where_it_is() -> None:
    kept = torch.zeros(2)
    with AllInFloat64():
        kept.add_(torch.tensor([1.0, 2.0]))
        kept[0] = 5
    assert torch.equal(kept, torch.tensor([5.0, 2.0]))


def test_bits_of_a_tensor_are_not_read_in_another_precision() -> None:
    def coarse(m: Any, x: Tensor) -> Any:
        return (x.float().view(torch.int32) & ~0xFFF).view(torch.float32) @ m.weight

    verifier, original = verifier_of(Model(coarse, weight=W.clone()), X)
    assert verifier.note is not None
    assert "in float32, because it fails in float64" in verifier.note
    assert "reads the bits" in verifier.note
    assert verifier.check(lambda x: [original(x)], FP32).passed


def test_another_result_in_float64_is_no_reference() -> None:
    """A branch on the dtype takes the other way where every number is wider."""

    def branches(m: Any, x: Tensor) -> Any:
        y = x @ m.weight.float()
        return y if x.dtype is torch.float32 else -y

    verifier, original = verifier_of(Model(branches, weight=W.clone()), X)
    assert verifier.note is not None
    assert "is another result" in verifier.note
    assert verifier.check(lambda x: [original(x)], FP32).passed


def test_integers_and_their_casts_stay() -> None:
    with AllInFloat64():
        indices = torch.arange(5) // 2
        assert indices.dtype is torch.int64
        assert indices.to(torch.int32).dtype is torch.int32
        assert (indices / 4).dtype is torch.float64
        assert torch.arange(5).mean(dtype=torch.float32).dtype is torch.float64
