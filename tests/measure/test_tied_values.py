"""Which outputs another order of equal values moves, and that passes keep the original's order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.lanes import FP32, LANES
from ampopt.measure.draws import Draw
from ampopt.measure.tied_values import Reordered, TiedValues
from tests.helpers import Model
from tests.support.verifying import verifier_of

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def ties_of(model: nn.Module, x: Tensor) -> TiedValues:
    verifier, _ = verifier_of(model.eval(), x)
    return TiedValues(verifier, verifier.draws, least_norm=0.0)


def runs_of(function: Callable[[Tensor], Any], row: list[float], near: float) -> list[Reordered]:
    """The runs where every row of the input is this one."""
    ties = ties_of(Model(lambda _, x: function(x)), X[:, : len(row)])
    return ties.runs(Draw("a row", ((torch.tensor([row] * len(X)),),)), near)


def open_outputs(function: Callable[[Tensor], Any], row: list[float], *, lane: Any = FP32) -> list[int]:
    """The outputs that move there."""
    jumps = zip(*(run.jumps for run in runs_of(function, row, lane.limits.always)), strict=True)
    return [output for output, of_runs in enumerate(jumps) if any(of_runs)]


def _top3(x: Tensor) -> Any:
    return x.topk(3, dim=-1)


@pytest.mark.parametrize(
    ("function", "row", "expected"),
    [
        (_top3, [5.0, 4.0, 3.0, 2.0, 1.0], []),
        (_top3, [5.0, 4.0, 3.0, 2.0, 2.0], []),  # none of the two is among the largest
        (_top3, [5.0, 4.0, 4.0, 2.0, 1.0], [1]),
        (_top3, [5.0, 4.0, 3.0, 3.0, 1.0], [1]),  # the last, and the first that is left out
        (_top3, [5.0, -torch.inf, -torch.inf, -torch.inf, 1.0], [1]),
        (_top3, [1e9, 4.0, 3.0, 2.0, 1.0], []),
        (_top3, [5.0, 4.0, 4.0 - 1e-5, 2.0, 1.0], [0, 1]),  # rounding may swap them
        (lambda x: x.topk(2, dim=-1, largest=False), [5.0, 5.0, 3.0, 2.0, 1.0], []),
        (lambda x: x.topk(2, dim=-1, largest=False), [5.0, 4.0, 2.0, 2.0, 1.0], [1]),
        (lambda x: x.topk(2, dim=0), [5.0, 4.0, 3.0, 2.0, 1.0], [1]),  # along the equal rows
        (lambda x: x.sort(dim=-1), [5.0, 4.0, 3.0, 2.0, 2.0], [1]),
        (lambda x: x.sort(dim=-1), [5.0, 4.0, 3.0, 2.0, 1.0], []),
        (lambda x: x.sort(dim=-1, stable=True), [5.0, 4.0, 3.0, 2.0, 2.0], []),
        (lambda x: x.sort(dim=-1, stable=False), [5.0, 4.0, 3.0, 2.0, 2.0], [1]),
        (lambda x: x.flip(-1).gather(-1, _top3(x)[1]).sort()[0], [5.0, 4.0, 3.0, 3.0, 1.0], [0]),
        (lambda x: x.argsort(-1, descending=True), [5.0, 4.0, 3.0, 2.0, 2.0], [0]),
        (lambda x: x.kthvalue(2, dim=-1), [5.0, 4.0, 3.0, 3.0, 1.0], [1]),
        (lambda x: x.kthvalue(2, dim=-1, keepdim=True), [5.0, 5.0, 3.0, 2.0, 1.0], []),
        (lambda x: x.median(dim=-1), [5.0, 4.0, 3.0, 3.0, 1.0], [1]),
        (lambda x: x.median(dim=0), [5.0, 4.0, 3.0, 2.0, 1.0], [1]),
        (lambda x: x.mode(dim=-1), [5.0, 4.0, 3.0, 3.0, 1.0], [1]),
        (lambda x: x.max(dim=-1), [5.0, 5.0, 3.0, 3.0, 1.0], []),  # the first of equal ones, as documented
        (lambda x: (x.argmax(-1), x * 2), [5.0, 5.0, 3.0, 3.0, 1.0], []),
        (lambda x: (x.flip(-1).gather(-1, _top3(x)[1]), x * 2), [5.0, 4.0, 4.0, 2.0, 1.0], [0]),
        (lambda x: _top3(x)[0].flip(-1) + 1, [5.0, 4.0, 4.0, 2.0, 1.0], []),
        (lambda x: x.sin(), [5.0, 4.0, 4.0, 2.0, 1.0], []),
    ],
)
def test_places_of_equal_values_are_open_and_nothing_else(
    function: Callable[[Tensor], Any], row: list[float], expected: list[int]
) -> None:
    assert open_outputs(function, row) == expected


def test_a_lane_of_fewer_bits_may_swap_more() -> None:
    row = [5.0, 4.0, 3.999, 2.0, 1.0]
    assert open_outputs(_top3, row) == []
    assert open_outputs(_top3, row, lane=LANES["amp"]["cpu"]) == [0, 1]


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda x: x.topk(2, dim=-1)[1][..., 1], 1),
        (lambda x: x.sort(dim=-1, descending=True)[1][..., 1], 1),
        (lambda x: x.argsort(-1, descending=True)[..., 1], 1),
        (lambda x: x.kthvalue(3, dim=-1)[1], 2),
        (lambda x: x.median(dim=-1)[1], 2),
        (lambda x: x.nanmedian(dim=-1)[1], 1),
        (lambda x: x.mode(dim=-1)[1], 1),
    ],
)
def test_the_first_run_takes_equal_values_in_the_order_of_their_places(
    function: Callable[[Tensor], Any], place: int
) -> None:
    """As ONNX's `TopK` does; the third smallest is the second of the equal ones."""
    first, *_ = runs_of(lambda x: function(x).double(), [5.0, 4.0, 4.0, 4.0, 1.0], 0.0)
    assert first.norms == pytest.approx([place * len(X) ** 0.5])


def test_a_run_explains_what_is_as_far_and_as_large() -> None:
    run, limit = Reordered((1.0, 1e-6), (2.0, 3.0)), 1e-5
    assert all(run.explains(0, error, limit, norm) for error in (0.6, 1.9) for norm in (1.5, 2.7))
    assert not any(run.explains(0, error, limit, 2.0) for error in (0.0, 0.4, 2.1, math.inf))
    assert not any(run.explains(0, 1.0, limit, norm) for norm in (0.0, 1.3, 3.0, math.inf))
    assert run.explains(1, 0.0, limit, 3.0)
    assert not run.explains(1, 1.0, limit, 3.0)


def test_a_run_that_raises_an_error_explains_nothing_and_shows_an_order() -> None:
    """A matrix may be singular with other places than the original's."""
    zeros = torch.zeros(3, 8)
    own = zeros.topk(5).indices

    def inverse(x: Tensor) -> Any:
        is_own = (x.topk(5).indices == own) | (x.amax() != x.amin())
        return torch.linalg.inv(torch.diag_embed(is_own.double()))

    ties = ties_of(Model(lambda _, x: inverse(x)), zeros)
    for run in ties.runs(Draw("another", ((zeros,),)), 0.0):
        assert run.jumps == (math.inf,)
        assert not run.explains(0, 1.0, 1e-5, 1.0)
        assert not run.explains(0, 0.0, 1e-5, 1.0)
    assert ties.first_without().name == "random inputs 1"


def test_programs_that_run_in_the_originals_place_have_its_order() -> None:
    """Those of passes and engines, on draws with equal values, too."""
    x = torch.randn(1, 20, generator=torch.Generator().manual_seed(1))

    def places(x: Tensor, *, stable: bool) -> Tensor:
        return x.clamp(max=x.abs().amax() / 2).sort(descending=True, stable=stable).indices

    verifier, original = verifier_of(Model(lambda _, x: places(x, stable=False)).eval(), x)
    assert verifier.check_errors(lambda x: [original(x)], FP32, everywhere=True).passed
    last = verifier.check_errors(lambda x: [19 - places(x.flip(1), stable=True)], FP32, everywhere=True)
    assert not last.passed
