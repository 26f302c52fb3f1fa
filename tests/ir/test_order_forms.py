"""Stable orders, k-th numbers and medians in ONNX Runtime are PyTorch's: equal values, NaN, infinity."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ampopt.errors import AmpoptError
from ampopt.ir.graph import calls
from ampopt.ir.order_forms import FORMS
from ampopt.ir.stable_forms import with_stable_forms
from tests.helpers import Model, program_of
from tests.support.exporting import export, run
from tests.support.side_by_side import results_by_name, side_by_side

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(0))

Functions = dict[str, Callable[[Tensor], Any]]

STABLE: Functions = {
    "sorted": lambda x: torch.sort(x, dim=1, stable=True),
    "sorted downwards": lambda x: torch.sort(x, stable=True, descending=True),
    "places": lambda x: torch.argsort(x, dim=0, stable=True),
    "places downwards": lambda x: torch.argsort(x, dim=1, descending=True, stable=True),
}
"""Where places of equal values are told, too."""

AT_A_PLACE: Functions = {
    "third": lambda x: torch.kthvalue(x, 3, 1),
    "last, kept": lambda x: torch.kthvalue(x, 6, keepdim=True),
    "middle of nine": lambda x: torch.median(x, 1),
    "middle of six, kept": lambda x: torch.median(x, -1, keepdim=True),
    "middle of four": lambda x: x.median(0),
    "middle of all": lambda x: x.median(),
    "middle of one": lambda x: x[:, :1].median(1),
}


IN_ORDER = torch.tensor([-2.0, -1.0, -1.0, 0.5, 0.5, 3.0])
LATER = torch.tensor([[[1.0, 2.0, 2.0, 4.0]], [[-3.0, 0.0, 1.0, 1.0]]])
SEARCHES: Functions = {
    "search": lambda x: torch.searchsorted(IN_ORDER, x),
    "search to the right": lambda x: torch.searchsorted(IN_ORDER, x, right=True),
    "search in int32": lambda x: torch.searchsorted(IN_ORDER, x, out_int32=True, side="right"),
    "search of each row": lambda x: torch.searchsorted(
        LATER.expand(2, 3, 4).contiguous(), x[:2, :3].contiguous()
    ),
    "samples of a distribution": lambda x: torch.searchsorted(
        x.softmax(-1).cumsum(-1), torch.linspace(0.05, 0.95, 5).expand(4, 9, 5).contiguous(), right=True
    ),
}


def _where_it_is(k: int) -> Callable[[Tensor], Tensor]:
    """What is at the place of the k-th value, which is that value."""
    return lambda x: x.gather(1, x.kthvalue(k, 1, keepdim=True).indices)


AT_PLACES: Functions = {f"at the place of number {k}": _where_it_is(k) for k in (1, 5, 8, 9)}

FOLLOWED: Functions = {
    "median of medians": lambda x: x.median(1).values.median(1).values,
    "median of all medians": lambda x: x.median(1).values.median(),
    "logarithm of a sum of medians": lambda x: x.median(1).values.logsumexp(1),
    "remainder of medians": lambda x: x.median(1).values % 0.25,
    "place of the largest median": lambda x: x.median(1).values.argmax(1),
    "place of the largest place": lambda x: x.max(1).indices.float().max(1).indices,
    "largest of third values": lambda x: x.kthvalue(3, 1).values.max(1).values,
    "spread of medians": lambda x: torch.var_mean(x.median(1).values, 1),
    "spread of the means of spreads": lambda x: torch.var_mean(torch.var_mean(x, 1)[1], 1),
}
"""Where another form reads what a form gives."""


def _value(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def value(x: Tensor) -> Tensor:
        found: Tensor | tuple[Tensor, Tensor] = function(x)
        return found if isinstance(found, Tensor) else found[0]

    return value


VALUES: Functions = {name: _value(function) for name, function in AT_A_PLACE.items()}
"""Those without the places, which are open where values are equal."""


def _spoilt() -> Tensor:
    x = X.mul(2).round()
    x[0, 3, 1] = x[2, :, 2] = x[3, 1:8, 4] = float("nan")
    x[1, 4, 0], x[1, 5, 0], x[3, 0, 4] = torch.inf, -torch.inf, torch.inf
    return x


@pytest.mark.parametrize(
    ("functions", "x"),
    [
        (STABLE | AT_A_PLACE | FOLLOWED, X),
        (STABLE | VALUES, X.mul(2).round()),
        (VALUES | AT_PLACES, _spoilt()),
        (STABLE | VALUES, X.mul(3).long()),
        (STABLE, X > 0),
    ],
    ids=["numbers", "equal ones", "NaN and infinity", "integers", "booleans"],
)
def test_results_are_pytorchs(functions: Functions, x: Tensor, tmp_path: Path) -> None:
    inputs = [x.clone() for _ in functions]
    example = X if x.is_floating_point() else x
    examples = [example.clone() for _ in functions]
    export(side_by_side(functions), tmp_path / "m.onnx", *examples, force=True)  # in zeros any place is right
    found = [torch.from_numpy(np.asarray(each)) for each in run(tmp_path / "m.onnx", *inputs)]
    for name, mine, wanted in results_by_name(functions, inputs, found):
        assert mine.dtype is wanted.dtype, name
        far = 1e-6 if name in FOLLOWED else 0.0
        torch.testing.assert_close(mine, wanted, rtol=far, atol=far, equal_nan=True, msg=name)


def test_every_form_is_used() -> None:
    functions = (STABLE | AT_A_PLACE | SEARCHES).values()
    graph = program_of(Model(lambda m, x: [f(x) for f in functions]).eval(), X).graph
    assert {node.target for node in calls(graph, FORMS)} == FORMS.keys()


def test_places_among_equal_numbers_are_in_an_order_that_a_file_may_have(tmp_path: Path) -> None:
    model = Model(lambda m, x: x.kthvalue(3, 1).indices.float()).eval()
    assert export(model, tmp_path / "m.onnx", X).reason is None


def test_a_median_of_a_varying_batch_is_one_for_each(tmp_path: Path) -> None:
    model = Model(lambda m, x: x.median(1).values).eval()
    export(model, tmp_path / "m.onnx", X, dynamic="batch")
    more = torch.randn(7, 9, 6)
    assert np.array_equal(run(tmp_path / "m.onnx", more)[0], more.median(1).values.numpy())


def test_a_median_along_what_varies_is_refused(tmp_path: Path) -> None:
    model = Model(lambda m, x: x.median(1).values).eval()
    with pytest.raises(AmpoptError):
        export(model, tmp_path / "m.onnx", X, dynamic={"x": {1: "n"}})


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_finds_the_place(name: str, tmp_path: Path) -> None:
    search = SEARCHES[name]
    export(Model(lambda m, x: search(x)), tmp_path / "m.onnx", X)
    x = X.clone()
    x[0, :2] = torch.tensor([-2.0, -1.0, 0.5, 3.0, math.inf, -math.inf])
    given = [x, torch.zeros_like(X)]
    if "distribution" not in name:
        given.append(torch.full_like(X, math.nan))
    for each in given:
        (found,) = run(tmp_path / "m.onnx", each)
        torch.testing.assert_close(torch.from_numpy(found), search(each))


def test_a_search_in_any_row_takes_pytorchs_steps(tmp_path: Path) -> None:
    """Rows that are in no order, and rows with NaN at their end, as `sort` leaves it."""
    rows = torch.randn(20, 37, generator=torch.Generator().manual_seed(3))
    values = torch.randn(20, 9, generator=torch.Generator().manual_seed(4))
    model = Model(lambda m, row, v: (torch.searchsorted(row, v), torch.searchsorted(row, v, right=True)))
    export(model, tmp_path / "m.onnx", rows, values)
    ends = rows.sort(-1).values
    ends[:, 30:], values[0, :3] = math.nan, torch.tensor([math.nan, math.inf, -math.inf])
    for row in (rows, ends):
        found = run(tmp_path / "m.onnx", row, values)
        for one, other in zip(found, model(row, values), strict=True):
            assert torch.equal(torch.from_numpy(one), other)


def test_a_search_by_a_sorter_is_left_alone() -> None:
    sorter = torch.arange(5, -1, -1)
    graph = program_of(Model(lambda m, x: torch.searchsorted(IN_ORDER.flip(0), x, sorter=sorter)), X).graph
    assert any(calls(with_stable_forms(graph, (X,)), FORMS))
