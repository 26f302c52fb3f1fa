"""What is optimized is the call as it was given: with the order of its arguments, and what it gives twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.measure.entry import ORIGINAL
from ampopt.search.example_call import prepare_call
from ampopt.search.partly_optimized import PartlyOptimizedModule
from tests.support.planted import keep_the_patched, optimize

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = 2 * X + 1


class Asks(nn.Module):
    """Asks whether its two images are one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Twice or three times the first."""
        out: Tensor = self.conv(a) * (2 if a is b else 3) + b.mean()
        return out


class Sensors(Asks):
    """Sees the order of its sensors."""

    def forward(self, **sensors: Tensor) -> Tensor:  # type: ignore[override]
        """One after the other."""
        return torch.cat([self.conv(sensor) for sensor in sensors.values()], 1)


class Around(nn.Module):
    """No single graph, with a submodule that gets one image twice, and then two images."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Two calls, of bright images in the other order."""
        y = x + 1
        first, second = self.inner(x, x), self.inner(x, y)
        out: Tensor = first - 2 * second if x.mean() > 10 else 2 * first - second
        return out


def close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, atol=1e-4)


def test_keyword_arguments_are_optimized_in_the_order_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_patched(monkeypatch)
    model = Sensors().eval()
    fast = optimize(model, None, example_kwargs={"rgb": X, "depth": Y}, precision="fp32")
    assert fast.report.chosen != ORIGINAL
    assert close(fast(rgb=X, depth=Y), model(rgb=X, depth=Y))
    assert fast.health.late_captures == 0
    assert close(fast(depth=Y, rgb=X), model(depth=Y, rgb=X))


@pytest.mark.parametrize("example", [(X, X), (X, X.clone())], ids=["the same", "equal"])
def test_a_model_that_asks_for_identity_is_answered_as_it_answers(
    example: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_the_patched(monkeypatch)
    model = Asks().eval()
    fast = optimize(model, example, precision="fp32")
    assert isinstance(fast, PartlyOptimizedModule) is (example[0] is example[1])
    assert fast.report.chosen != ORIGINAL
    for _ in range(2):
        for args in itertools.product((X, Y, X.clone()), repeat=2):
            assert close(fast(*args), model(*args))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_submodule_gets_what_it_was_given(swapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_patched(monkeypatch)
    model = Around(Asks()).eval()
    fast = optimize(model, X, precision="fp32")
    assert isinstance(fast, PartlyOptimizedModule)
    assert fast.report.chosen != ORIGINAL
    x = Y + 20 if swapped else Y
    assert close(fast(x), model(x))


def test_the_example_keeps_its_order_and_what_is_given_twice() -> None:
    given: dict[str, Any] = {"z": X, "b": [X, 3], "a": Y}

    class Takes(nn.Module):
        def forward(self, x: Tensor, **rest: Any) -> Any:
            """As given."""
            assert x is rest["z"] is rest["b"][0]
            assert list(rest) == ["z", "b", "a"]
            return x

    _, args, kwargs, _ = prepare_call(Takes(), (X,), given, "cpu")
    assert args[0] is kwargs["z"] is kwargs["b"][0]
    assert args[0] is not X
    assert list(kwargs) == list(given)
