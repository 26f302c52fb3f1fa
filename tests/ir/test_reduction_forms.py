"""Reductions in ONNX Runtime are PyTorch's: over all dimensions, in short integers, and running ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.engines.executable import executable
from ampopt.errors import AmpoptError
from ampopt.ir.graph import aten, calls
from ampopt.ir.reduction_forms import FORMS, LONGEST
from ampopt.ir.stable_forms import with_stable_forms
from ampopt.passes import OnnxRuntime
from tests.helpers import Model, program_of
from tests.support.exporting import export, run

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
INF = math.inf

Functions = dict[str, Callable[[Tensor], Any]]

OF_NUMBERS: Functions = {
    "largest": lambda x: x.amax(),
    "smallest": lambda x: x.amin(),
    "largest of no named dimensions": lambda x: x.amax(dim=[]),
    "largest, kept": lambda x: torch.amax(x, dim=(), keepdim=True),
    "smallest of two dimensions": lambda x: x.amin((0, -1)),
    "largest of one number": lambda x: x[0, 0, 0].amax(),
    "smallest of one number along its dimension": lambda x: x[0, 0, 0].amin(0),
    "both": lambda x: torch.stack(torch.aminmax(x)),
    "both of rows": lambda x: torch.stack(torch.aminmax(x, dim=1, keepdim=True)),
    "whether any is": lambda x: (x > 1).any(),
    "whether all are": lambda x: (x > -1).all(),
    "whether any number is not 0": lambda x: x.any(),
    "whether all numbers are not 0": lambda x: x.all(),
    "whether all of two dimensions are": lambda x: x.all(dim=(0, 1)),
    "logsumexp of one number": lambda x: x[0, 0, 0].logsumexp(0),
    "running logsumexp": lambda x: x.logcumsumexp(-1),
    "running logsumexp of columns": lambda x: x.logcumsumexp(1),
    "running logsumexp of one": lambda x: x[:1].logcumsumexp(0),
    "running logsumexp of a number": lambda x: x[0, 0, 0].logcumsumexp(0),
    "running product": lambda x: x.cumprod(-1),
    "running product of a number": lambda x: x[0, 0, 0].cumprod(0),
    "running maximum": lambda x: x.cummax(-1).values,
    "running minimum of columns": lambda x: x.cummin(1).values,
    "place of a running maximum": lambda x: x.cummax(-1).indices,
    "place of a running minimum of rounded numbers": lambda x: x.round().cummin(0).indices,
    "running maximum of one": lambda x: x[:1].cummax(0).values,
}

SHORT = (torch.int8, torch.uint8, torch.int16)


def _typed(function: Callable[..., Tensor], kind: torch.dtype, *args: Any) -> Callable[[Tensor], Tensor]:
    return lambda i: function(i, *args, dtype=kind)


OF_INTEGERS: Functions = {
    "largest": lambda i: i.amax(),
    "smallest, kept": lambda i: torch.amin(i, dim=(), keepdim=True),
    "largest of an axis": lambda i: i.amax(1),
    "largest of all": lambda i: i.max(),
    "smallest of all": lambda i: i.min(),
    "both": lambda i: torch.stack(torch.aminmax(i)),
    "sum of what is a number": lambda i: i.nansum(),
    "sum of rows of what are numbers": lambda i: i.nansum(1, keepdim=True),
    "whether any is": lambda i: i.any(),
    "whether all are": lambda i: i.all(),
    "running product": lambda i: i.cumprod(1),
    "running maximum": lambda i: i.cummax(1).values,
    "place of a running minimum": lambda i: (i % 3).cummin(-1).indices,
    "sum in booleans": lambda i: i.sum(dtype=torch.bool),
    "product in booleans": lambda i: i.prod(1, dtype=torch.bool),
    **{f"sum in {kind}": _typed(torch.sum, kind) for kind in SHORT},
}


def _totals(kind: torch.dtype) -> Functions:
    """Totals in a short kind, which are those of 64 bits whatever they are of."""
    return {
        f"sums in {kind}": _typed(torch.sum, kind, (0, 2), True),
        f"product in {kind}": _typed(torch.prod, kind),
        f"products in {kind}": _typed(torch.prod, kind, 1, True),
        f"running sum in {kind}": _typed(torch.cumsum, kind, 1),
        f"running product in {kind}": _typed(torch.cumprod, kind, 2),
    }


TOTALS: dict[torch.dtype, Functions] = {
    torch.bool: _totals(torch.int8),
    torch.uint8: _totals(torch.int16),
    torch.int8: _totals(torch.uint8),
    torch.int16: _totals(torch.int8),
    torch.int32: _totals(torch.uint8),
    torch.int64: {name: total for kind in SHORT for name, total in _totals(kind).items()},
}
"""Totals of each dtype: of the widest one in every short kind."""

INTEGERS = torch.randint(-1000, 1000, (2, 3, 5), generator=torch.Generator().manual_seed(0))


def _all_of(functions: Functions) -> Model:
    return Model(lambda m, x: tuple(function(x) for function in functions.values()))


def _runs(functions: Functions, x: Tensor) -> Callable[[Tensor], dict[str, Tensor]]:
    """All of these functions in ONNX Runtime, in one graph."""
    done = executable(OnnxRuntime(session=()).apply(program_of(_all_of(functions), x)).program)
    return lambda given: dict(zip(functions, done(given), strict=True))


def _with(*numbers: float) -> Tensor:
    """Numbers of which the last rows begin with these."""
    changed = X.clone()
    changed[-1, :, : len(numbers)] = torch.tensor(numbers)
    return changed


INPUTS = {
    "usual": X,
    "large": 1e4 * X,
    "largest": torch.full_like(X, 3e38),
    "zero": torch.zeros_like(X),
    "minus infinity": torch.full_like(X, -INF),
    "infinities": _with(-INF, -INF, 1.0, INF, INF),
    "NaN": _with(1.0, math.nan),
    "both infinities": _with(INF, -INF),
}


@pytest.fixture(scope="module")
def of_numbers() -> Callable[[Tensor], dict[str, Tensor]]:
    return _runs(OF_NUMBERS, X)


@pytest.mark.parametrize("given", INPUTS)
def test_reductions_of_numbers_are_eager_s(
    given: str, of_numbers: Callable[[Tensor], dict[str, Tensor]]
) -> None:
    x = INPUTS[given]
    for name, got in of_numbers(x).items():
        wanted = OF_NUMBERS[name](x)
        torch.testing.assert_close(
            got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True, msg=f"{name}: {{}}".format
        )


@pytest.mark.parametrize("dtype", TOTALS)
def test_reductions_of_integers_are_eager_s_and_go_around(dtype: torch.dtype) -> None:
    x = INTEGERS.to(dtype)
    functions = OF_INTEGERS | TOTALS[dtype]
    done = _runs(functions, x)
    ends = () if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for given in (x, torch.zeros_like(x), *(torch.full_like(x, end) for end in ends)):
        for name, got in done(given).items():
            wanted = functions[name](given)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=f"{name}: {{}}".format)


def test_a_total_of_numbers_in_short_integers_is_of_what_they_are_cut_to() -> None:
    functions: Functions = {
        "sum": lambda x: x.sum(dtype=torch.int8),
        "product": lambda x: (x * 10).prod(1, dtype=torch.int16),
        "running sum": lambda x: (x * 10).cumsum(1, dtype=torch.uint8),
        "running product": lambda x: (x * 10).cumprod(1, dtype=torch.int16),
    }
    for name, got in _runs(functions, X.abs())(X.abs()).items():
        assert torch.equal(got, functions[name](X.abs())), name


def test_an_exported_file_has_them(tmp_path: Path) -> None:
    """Of short integers those of one kind; a runtime has the others, too."""
    others = {"sum in torch.uint8", "sum in torch.int16"}
    of_integers = {n: f for n, f in OF_INTEGERS.items() if n not in others} | _totals(torch.int8)
    assert len(of_integers) == len(OF_INTEGERS) - 2 + 5
    for x, functions in ((X, OF_NUMBERS), (INTEGERS, of_integers)):
        path = tmp_path / f"{x.dtype}.onnx"
        export(_all_of(functions), path, x)
        for got, function in zip(run(path, x), functions.values(), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), function(x), rtol=1e-5, atol=1e-5)


def test_every_form_is_used_by_one_of_these() -> None:
    of_integers = OF_INTEGERS | TOTALS[torch.int64]
    graphs = [program_of(_all_of(each), x).graph for each, x in ((OF_NUMBERS, X), (of_integers, INTEGERS))]
    assert {node.target for graph in graphs for node in calls(graph, FORMS)} == FORMS.keys()


def test_named_dimensions_and_long_products_are_left_alone() -> None:
    named = program_of(Model(lambda m, x: x.amax((0, 1))), X).graph
    assert [node.name for node in calls(with_stable_forms(named, (X,)))] == [n.name for n in calls(named)]
    long = torch.ones(LONGEST + 1)
    product = program_of(Model(lambda m, x: x.cumprod(0)), long).graph
    assert any(calls(with_stable_forms(product, (long,)), [aten.cumprod.default]))


@pytest.mark.parametrize("function", [lambda x: x.logcumsumexp(1), lambda x: x.cumprod(1)])
def test_what_runs_along_a_size_that_varies_is_refused(
    function: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    export(Model(lambda m, x: function(x)), tmp_path / "rows.onnx", X, dynamic={"inputs_0": {0: "rows"}})
    with pytest.raises(AmpoptError):
        export(Model(lambda m, x: function(x)), tmp_path / "m.onnx", X, dynamic={"inputs_0": {1: "n"}})
