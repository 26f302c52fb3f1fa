"""The original with its weights rounded anew, several times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.lanes import FP32
from ampopt.ir.numerics import SPAN, rounded_anew
from tests.helpers import Model
from tests.support.verifying import verifier_of

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def weighted() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.linear(x) * m.scale + m.offset
        return y

    torch.manual_seed(3)
    own = {"scale": torch.rand(4) + 1, "offset": torch.rand(4, dtype=torch.float64).float()}
    return Model(forward, linear=nn.Linear(4, 4), **own).eval()


def by_hand(model: nn.Module, seed: int) -> Tensor:
    """From the model's own weights, whatever was rounded before."""
    generator = torch.Generator().manual_seed(seed)
    weights = [*model.parameters(), *model.buffers()]
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    rounded = {n: rounded_anew(w, FP32.dtype, generator) for n, w in zip(names, weights, strict=True)}
    found: Any = torch.func.functional_call(model, rounded, rounded_anew(X, FP32.dtype, generator))
    return found.detach()  # type: ignore[no-any-return]


def test_each_time_it_is_from_the_models_own_weights() -> None:
    model = weighted()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    verifier, original = verifier_of(model, X)
    runs = [run(X)[0].clone() for run in verifier.runs_rounded_anew(FP32, range(3))]
    for seed, found in enumerate(runs):
        assert torch.equal(found, by_hand(original, seed))
    assert not torch.equal(runs[0], runs[1])
    for each in (model, original):
        assert all(torch.equal(own, before[name]) for name, own in each.state_dict().items())
    assert torch.equal(verifier.eager(FP32)(X)[0], original(X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", ["rows", "channels last", "every second", "one row repeated"])
def test_each_number_of_a_long_tensor_moves_by_a_rounding_at_the_most(
    layout: str, dtype: torch.dtype
) -> None:
    x = torch.rand(2, 3, 160, 160, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    x[0, 0, 0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    x = {
        "rows": x.to(dtype),
        "channels last": x.to(dtype, memory_format=torch.channels_last),
        "every second": x.to(dtype).transpose(1, 3)[:, ::2],
        "one row repeated": x.to(dtype)[:, :, :1].expand(2, 3, 160, 160),
    }[layout]
    assert x.numel() > SPAN
    found = rounded_anew(x, torch.float16, torch.Generator().manual_seed(1))
    assert (found.shape, found.dtype) == (x.shape, dtype)
    if layout != "one row repeated":
        assert found.stride() == torch.empty_like(x).stride()
    is_finite = x.isfinite()
    assert torch.equal(found[~is_finite].nan_to_num(), x[~is_finite].nan_to_num())
    moves = ((found.double() - x.double()) / x.double())[is_finite & (x != 0)] / (
        torch.finfo(torch.float16).eps / 2
    )
    assert moves.abs().max() <= (2.0 if dtype is torch.float16 else 1.001)
    assert moves.mean().abs() < 0.02
    assert (moves > 0.1).double().mean() > 0.1
    assert (moves < -0.1).double().mean() > 0.1


def test_what_repeats_in_a_long_tensor_does_not_move_alike() -> None:
    """Channels of a power of two of pixels, as convolutions add them, and halves of the tensor."""
    weight = nn.Parameter(torch.ones(64, 64, 64))
    moves = rounded_anew(weight, torch.float16, torch.Generator().manual_seed(0)) - 1
    pixels = moves.flatten(1)
    assert torch.corrcoef(pixels).fill_diagonal_(0).abs().max() < 0.1
