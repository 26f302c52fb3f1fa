"""The health of models that are no single OptimizedModule: of parts, and loaded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.deploy.health import Event
from ampopt.errors import InputError, StrictError
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.ledger import Ledger
from ampopt.search.partly_optimized import PartlyOptimizedModule
from ampopt.system.environment import environment
from tests.helpers import Model
from tests.support.planted import module_of, optimize


class TwoParts(nn.Module):
    """A part that is called with as many rows as its input has positive numbers, and what follows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.rest = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        found: Tensor = self.rest(self.part(rows))
        return found


X = torch.tensor([[1.0, 2, 3, 4], [1.0, 0, 1, 0], [-1.0, 1, 1, 1]])


def in_parts(chosen: str = "fp32") -> tuple[nn.Module, PartlyOptimizedModule]:
    model = TwoParts().eval()
    part = module_of(model.part, torch.zeros(2, 4), max_captures=0)
    report = Ledger("TwoParts", {}, ())
    report.chosen = chosen
    return model, PartlyOptimizedModule(model, {"part": part}, None, report, torch.device("cpu"))


def test_parts_that_run_as_they_were_are_counted_and_with_strict_refused() -> None:
    model, fast = in_parts()
    events: list[Event] = []
    stop = fast.on_health(events.append)
    assert torch.allclose(fast(X), model(X))
    assert fast.health.is_good
    for _ in range(2):
        assert torch.allclose(fast(-X), model(-X))
    assert fast.health.served_by_original == len(events) == 2
    stop()
    assert not fast.strict
    fast.strict = True
    with pytest.raises(StrictError, match=r"float32\[1, 4\] on cpu"):
        fast(-X)
    assert fast.health.refusals == 1
    assert len(events) == 2


def test_parts_are_for_inference_too() -> None:
    _, fast = in_parts()
    with pytest.raises(InputError, match="for inference"):
        torch.func.grad(lambda x: fast(x).sum())(X)
    assert fast.health.refusals == 1


def test_in_parts_the_dtype_under_autocast_is_the_originals() -> None:
    model, fast = in_parts()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found, expected = fast(X), model(X)
    assert found.dtype is expected.dtype is torch.bfloat16
    assert torch.allclose(found, expected, atol=0.05)
    assert fast(X).dtype is torch.float32


def test_parts_of_which_none_is_faster_say_so() -> None:
    assert in_parts(ORIGINAL)[1].health.chose_original
    assert not in_parts()[1].health.chose_original


def test_optimize_passes_strict_on() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    assert optimize(model, X, strict=True, budget_s=1.0, precision="fp32", cache=False).strict
    assert not optimize(model, X, budget_s=1.0, precision="fp32", cache=False).strict
    branching = Model(lambda m, x: m.line(x) if x.sum() > 0 else x, line=nn.Linear(4, 4))
    assert optimize(branching, X, strict=True, budget_s=1.0, precision="fp32", cache=False).strict


@pytest.mark.parametrize("backend", ["ampopt", "original"])
def test_a_loaded_model_counts_what_it_refuses(backend: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 4).eval()
    made = module_of(model, X)
    made.report.environment.update(environment(torch.device("cpu")))  # so that nothing is measured anew
    path, events = tmp_path / "model.ampopt", list[Event]()
    made.save(path, onnx=None)
    loaded = ampopt.load(path, backend=backend, device="cpu", budget_s=1.0)
    stop = loaded.on_health(events.append)
    assert torch.allclose(loaded(X), model(X))
    bad: list[Any] = [X[:1], X.to_sparse()]
    for tensor in bad:
        with pytest.raises(InputError):
            loaded(tensor)
    with pytest.raises(InputError, match="for inference"):
        torch.func.grad(lambda x: loaded(x).sum())(X)
    assert loaded.health.refusals == len(events) == 3
    stop()
    assert loaded.health.chose_original or backend == "ampopt"
