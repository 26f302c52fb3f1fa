"""How many casts autocast adds to each operator, of models whose true number is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampopt.diagnosis.examine import measure
from ampopt.diagnosis.findings import autocast_casts
from ampopt.diagnosis.operators import Spent, profiled
from tests.helpers import BF16, Model, program_of
from tests.support.cases import case_of, every_remedy_helps

X = torch.randn(2, 8)
IMAGE = torch.randn(1, 3, 8, 8)


def of(forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> nn.Module:
    return Model(forward, **parts).eval()


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def frozen() -> nn.Module:
    return nn.Linear(8, 8).requires_grad_(False)


needs_lstm_in_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="PyTorch has no LSTM in bfloat16 on this processor",
)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


@pytest.mark.parametrize(
    ("casts", "model", "x"),
    [
        (3, linear(), X),  # its input, its weight and its bias
        (2, nn.Linear(8, 8, bias=False), X),
        (3, nn.Conv2d(3, 4, 3), IMAGE),
        (5, nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), IMAGE),
        (5, nn.Sequential(linear(), nn.LayerNorm(8), linear()), X),
        # Four weights, the input and two states.
        pytest.param(7, Recurrent(8, 8), torch.randn(3, 1, 8), marks=needs_lstm_in_bfloat16),
        (2, of(lambda m, x: torch.einsum("ij,kj->ik", x, x + 1)), X),  # inside of what einsum is made of
        (2, of(lambda m, x: F.mse_loss(x.bfloat16(), x.bfloat16() + 1)), X),  # both to float32
        (1, of(lambda m, x: torch.cat([x, x.bfloat16()], 1)), X),
        (2, of(lambda m, x: x @ x.mT), X),
        (0, nn.LayerNorm(8), X),
    ],
)
def test_casts_that_autocast_adds_are_counted(casts: int, model: nn.Module, x: Tensor) -> None:
    assert sum(counted(model, x)) == casts


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.relu(x) + 1,
        lambda m, x: x.bfloat16() + 1,
        lambda m, x: x.bfloat16().mean(1),
        lambda m, x: x.bfloat16().mean(),
        lambda m, x: x.half().float() * 2,
        lambda m, x: x.bfloat16().softmax(1),
        lambda m, x: x.bfloat16().sum(1, dtype=torch.float32),
        lambda m, x: (x > 0).to(x.dtype).cumsum(1),
        lambda m, x: F.gelu(x.bfloat16()).var(1),
        lambda m, x: F.interpolate(x[None, None].bfloat16(), scale_factor=2, mode="bilinear"),
    ],
)
def test_what_operators_and_models_convert_themselves_are_no_casts_of_autocast(
    forward: Callable[[Any, Tensor], Tensor],
) -> None:
    assert sum(counted(of(forward), X)) == 0


@pytest.mark.parametrize(
    ("casts", "model"),
    [
        (3, of(lambda m, x: m.inner(m.inner(x)), inner=linear())),
        (4, of(lambda m, x: m.inner(m.inner(x)).float() @ m.inner.weight, inner=linear())),
        (5, of(lambda m, x: m.inner(m.inner(x)), inner=frozen())),
        (3, of(lambda m, x: x @ m.buffer @ m.buffer, buffer=torch.randn(8, 8))),
    ],
)
def test_a_weight_that_requires_gradients_is_cast_once_in_a_call_as_autocast_keeps_it(
    casts: int, model: nn.Module
) -> None:
    for _ in range(2):  # what is kept is kept for one call
        assert sum(counted(model, X)) == casts
    assert torch.is_autocast_cache_enabled()


def test_layers_without_casts_are_not_among_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ReLU())
    casting = {"conv2d": Spent(1e-3, casts=3, casts_s=1e-5)}
    (found,) = autocast_casts.find(case_of(model, IMAGE, spent=lambda name: casting.get(name, Spent(1e-3))))
    assert [place.split(",")[0] for place in found.places] == ["1"]
    assert not list(autocast_casts.find(case_of(model, IMAGE)))


def test_a_case_counts_what_autocast_casts_in_a_call_of_its_own_weights() -> None:
    model = of(lambda m, x: m.cold(m.cold(m.inner(m.inner(x)))), inner=linear(), cold=frozen())
    case = case_of(model, X)
    measure(case, (case.lanes["fp32"], case.lanes["amp"]), lambda *_: None)
    assert sum(layer.spent["amp"].casts for layer in case.layers) == 1 + 2 + 4
    assert not any(layer.spent["fp32"].casts for layer in case.layers)


def counted(model: nn.Module, x: Tensor) -> list[int]:
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    found = profiled(BF16.start(program_of(model.eval(), x)), 1, trained)
    return [spent.casts for spent in found.values()]
