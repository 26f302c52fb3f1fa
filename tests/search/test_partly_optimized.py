"""What serves for a model that is not one graph: its code, with parts in their places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import InputError
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.ledger import Ledger
from ampopt.search.partly_optimized import PartlyOptimizedModule, as_it_was, patched


def test_a_submodule_for_which_nothing_is_faster_is_part_of_the_code_around_it() -> None:
    """Its report and its bundle stay; what serves has no wrapper in its place."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            return y * 2 if y.sum() > -100 else y

    report = Ledger("first", {}, (), chosen=ORIGINAL)
    faster = Ledger("first", {}, (), chosen="fp32")
    model = Branching().eval()
    for own, is_patched in ((report, False), (faster, True)):
        stand_in: Any = type("Part", (nn.Identity,), {"report": own, "layouts": None})()
        assert ("forward" in vars(patched(model, {"first": stand_in}).first)) == is_patched


class Halving(nn.Module):
    """Counts its calls in an attribute, and fails on other channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        return y / 2 if y.sum() > -100 else y


def _unoptimized(model: nn.Module, x: Tensor, *, is_copy: bool = True) -> PartlyOptimizedModule:
    return as_it_was(model, (x,), {}, "it is not one graph", started=0.0, is_copy=is_copy)


def test_where_the_original_answers_it_is_tried_on_the_calls_to_prepare() -> None:
    model = Halving().eval().double()
    fast = _unoptimized(model, torch.ones(2, 4, dtype=torch.float64))
    fast.prepare((3, 4), torch.ones(1, 4, dtype=torch.float64))
    with pytest.raises(InputError, match=r"^the model fails on the call to prepare: mat1 and mat2 shapes"):
        fast.prepare((3, 5))
    with pytest.raises(InputError, match="prepare takes shapes, tensors or tuples"):
        fast.prepare([3, 4])
    assert model.calls == 0, "no copy was called"


def test_the_users_own_model_is_not_called_by_prepare() -> None:
    model = Halving().eval()
    _unoptimized(model, torch.ones(2, 4), is_copy=False).prepare((3, 5))
    assert model.calls == 0


@pytest.mark.parametrize(
    "trace", [torch.jit.trace, lambda fast, x: torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), fast))]
)
def test_a_trace_of_a_model_that_is_not_one_graph_is_refused(trace: Any) -> None:
    fast, x = _unoptimized(Halving().eval(), torch.ones(2, 4)), torch.ones(2, 4)
    with pytest.raises(InputError, match="cannot be traced by"):
        trace(fast, x)
    assert fast.health.refusals == 1
    assert fast(x).shape == (2, 4)
