"""The original with its weights rounded anew, several times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ampopt.ir.lanes import FP32
from ampopt.ir.numerics import rounded_anew
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
    runs = [run(X)[0].clone() for run in verifier.runs_rounded_anew(FP32, 3)]
    for seed, found in enumerate(runs):
        assert torch.equal(found, by_hand(original, seed))
    assert not torch.equal(runs[0], runs[1])
    for each in (model, original):
        assert all(torch.equal(own, before[name]) for name, own in each.state_dict().items())
    assert torch.equal(verifier.eager(FP32)(X)[0], original(X))
