"""`forward` may be anything that can be called: a lambda, a partial, a method of another class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.diagnosing import Diagnosis
from tests.support.cases import CEILINGS


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)


def run(model: Any, x: Tensor, factor: int = 1) -> Tensor:
    return model.norm(model.conv(x)).relu() * factor  # type: ignore[no-any-return]


class Lambda(Layers):
    forward = lambda self, x: run(self, x)  # noqa: E731


class PartialMethod(Layers):
    def scaled(self, x: Tensor, factor: int) -> Tensor:
        return run(self, x, factor)

    forward = functools.partialmethod(scaled, factor=2)


class Property(Layers):
    @property
    def forward(self) -> Callable[[Tensor], Tensor]:  # type: ignore[override]
        return functools.partial(run, self)


class Static(nn.Module):
    forward = staticmethod(lambda x: x.relu())


class Builtin(nn.Module):
    forward = staticmethod(torch.relu)


class Calling:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return run(self.model, x)


def given(make: Callable[[nn.Module], Callable[..., Any]]) -> nn.Module:
    model = Layers()
    model.forward = make(model)
    return model


def compiled(model: nn.Module) -> nn.Module:
    made: Any = torch.compile(model, backend="eager")
    assert isinstance(made, nn.Module)
    return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lambda of the class": Lambda,
    "partialmethod": PartialMethod,
    "property": Property,
    "static lambda": Static,
    "builtin": Builtin,
    "lambda of the object": lambda: given(lambda model: lambda x: run(model, x)),
    "partial of the object": lambda: given(lambda model: functools.partial(run, model, factor=2)),
    "callable object": lambda: given(Calling),
    "another model's method": lambda: given(lambda _: Lambda().forward),
    "compiled": lambda: compiled(Lambda()),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that are made up, few samples, and short pauses."""
    for module in ("diagnosing", "diagnosing_training"):
        monkeypatch.setattr(f"ampopt.{module}.ceilings_of", lambda *_: CEILINGS)
    monkeypatch.setattr("ampopt.diagnosis.examine.EAGER_S", 0.1)
    monkeypatch.setattr("ampopt.diagnosis.findings.cold_calls.IDLE_S", 0.01)
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.0)
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)


def check(found: Diagnosis) -> None:
    assert found.latency["fp32"].median > 0
    assert found.verdict in str(found).replace("\n", " ")
    assert not [note for note in found.notes if "could not be examined" in note]


@pytest.mark.parametrize("name", MODELS)
def test_a_call_is_diagnosed(name: str) -> None:
    found = ampopt.diagnose(MODELS[name](), torch.randn(1, 3, 8, 8), budget_s=0.1, progress=False)
    check(found)
    assert found.layers or any(each.name == "graph-break" for each in found.findings)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("static lambda", "builtin")])
def test_a_training_step_is_diagnosed(name: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    found = ampopt.diagnose(MODELS[name](), x, train=True, budget_s=0.1, progress=False)
    check(found)
    assert set(found.training["fp32"].parts) == {"zero_grad", "forward", "backward", "optimizer"}
