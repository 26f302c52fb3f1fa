"""torch.compile(backend=ampopt's): inputs with gaps or overlaps in memory, gradients, and errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.torch_compile import backend
from tests.helpers import Model
from tests.support.planted import NO_ENGINES

OPTIONS: dict[str, Any] = {"exclude": NO_ENGINES, "budget_s": 20.0, "cache": False, "progress": False}

pytestmark = pytest.mark.usefixtures("through_dynamo")


def compiled(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model.eval(), backend=backend, dynamic=False, options=OPTIONS)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


INPUTS = {
    "crop": random(2, 3, 20, 20)[:, :, 3:11, 5:13],
    "subsampled": random(2, 3, 16, 16)[..., ::2, ::2],
    "expanded": random(1, 3, 8, 8).expand(2, 3, 8, 8),
    "windows": random(2, 3, 8, 11).as_strided((2, 3, 8, 8), (264, 88, 11, 1)),
    "overlapping": random(600).as_strided((2, 3, 8, 8), (192, 64, 5, 1)),
    "channels last": random(2, 3, 8, 8).to(memory_format=torch.channels_last),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a channel": lambda x: x[:, 0],
    "permuted": lambda x: x.permute(0, 2, 3, 1),
    "rows": lambda x: x[1, :, 2:5],
}


@pytest.mark.parametrize("given", INPUTS)
def test_a_view_of_an_input_is_that_of_the_input_as_it_lies_in_memory(given: str) -> None:
    body = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
    model = Model(lambda m, x: (m.body(x), *(take(x) for take in VIEWS.values())), body=body)
    fast, x = compiled(model), INPUTS[given]
    for _ in range(2):
        (y, *views), (right, *others) = fast(x), model(x)
        torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-5)
        for name, found, expected in zip(VIEWS, views, others, strict=True):
            assert torch.equal(found, expected), name
            assert (found.stride(), found.data_ptr()) == (expected.stride(), expected.data_ptr()), name


def test_a_graph_that_turns_gradients_on_keeps_them(caplog: pytest.LogCaptureFixture) -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def saliency(model: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            y = model.body(own).sum()
        return torch.autograd.grad(y, own)[0]

    def learning(model: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return model.body(x)  # type: ignore[no-any-return]

    x = random(2, 3, 8, 8)
    with caplog.at_level(logging.WARNING, logger="ampopt"):
        for forward in (saliency, learning):
            model = Model(forward, body=body).eval()
            found, expected = compiled(model)(x), model(x)
            torch.testing.assert_close(found, expected)
            assert found.requires_grad == expected.requires_grad
    assert "it turns gradients on itself" in caplog.text


def test_a_graph_without_gradients_to_turn_on_is_optimized(caplog: pytest.LogCaptureFixture) -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).requires_grad_(False)

    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return model.body(x) * 2  # type: ignore[no-any-return]

    model, x = Model(forward, body=body).eval(), random(2, 3, 8, 8)
    with caplog.at_level(logging.WARNING, logger="ampopt"):
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-5)
    assert "runs as it was" not in caplog.text


def test_what_float64_refuses_is_not_written_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model.first(x)
        return model.second(y.float())  # type: ignore[no-any-return]

    model = Model(forward, first=nn.Conv2d(3, 4, 3), second=nn.Conv2d(4, 4, 3)).eval()
    x = random(2, 3, 8, 8)
    torch.testing.assert_close(compiled(model)(x), model(x), rtol=2e-2, atol=2e-2)
    assert "Traceback" not in capfd.readouterr().err
