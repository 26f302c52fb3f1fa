"""An optimized module as a `torch.nn.Module`: weights can be read and saved, and nothing can change them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import InputError
from tests.helpers import with_statistics
from tests.support.planted import optimize

X = torch.randn(1, 3, 8, 8)


class Branching(nn.Module):
    """Not one graph: it branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * 2 if float(y.sum()) > 1e9 else y


def network() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))


@pytest.fixture(scope="module", params=[network, Branching], ids=["one graph", "in parts"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    model: nn.Module = request.param()
    return model, optimize(model, X, precision="fp32", budget_s=3)


Pair = tuple[nn.Module, Any]


def test_weights_are_those_of_the_original(pair: Pair) -> None:
    model, fast = pair
    for mine, its in (
        (fast.named_parameters(), model.named_parameters()),
        (fast.named_buffers(), model.named_buffers()),
        (fast.state_dict().items(), model.state_dict().items()),
        (fast.state_dict(prefix="a.").items(), model.state_dict(prefix="a.").items()),
        (nn.Sequential(fast).state_dict().items(), nn.Sequential(model).state_dict().items()),
    ):
        found, expected = dict(mine), dict(its)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert next(fast.parameters()).device == X.device


def test_what_is_saved_of_it_is_loaded_into_the_model(pair: Pair) -> None:
    model, fast = pair
    torch.save(fast.state_dict(), file := io.BytesIO())
    file.seek(0)
    other = type(model)(*model) if isinstance(model, nn.Sequential) else type(model)()
    assert other.load_state_dict(torch.load(file)).missing_keys == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda fast: fast.load_state_dict(network().state_dict()), "load them into the original"),
        (lambda fast: fast.load_state_dict({}, strict=False), "load them into the original"),
        (lambda fast: fast.half(), "precision= for other dtypes"),
        (lambda fast: fast.to("meta"), "device= for another device"),
        (lambda fast: fast.train(), "cannot be trained"),
        (lambda fast: fast.requires_grad_(), "cannot be trained"),
        (lambda fast: ampopt.optimize(fast, X), "the model is optimized already"),
        (lambda fast: ampopt.optimize(nn.Sequential(nn.Identity(), fast), X), "submodule 1 of the model is"),
    ],
)
def test_what_would_change_it_is_refused(pair: Pair, change: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        change(pair[1])
    assert pair[1].eval() is pair[1]
    assert pair[1].requires_grad_(False) is pair[1]


def test_a_model_in_parts_says_why_it_cannot_leave() -> None:
    fast: Any = optimize(Branching(), X, precision="fp32", budget_s=3)
    for leave in (fast.save, fast.export_onnx):
        with pytest.raises(InputError, match="this one is not: not one graph: "):
            leave("robot.ampopt")


def test_a_model_that_answers_itself_has_nothing_to_prepare() -> None:
    fast: Any = optimize(Branching(), X, precision="fp32", budget_s=0.01)
    assert fast.report.chosen == "original"
    fast.prepare((2, 3, 8, 8))


def test_a_nested_tensor_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    with pytest.raises(InputError, match="to_padded_tensor"):
        ampopt.optimize(nn.Linear(8, 4), nested)
