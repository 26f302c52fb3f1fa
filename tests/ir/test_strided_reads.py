"""What reads memory by strides: it finds its argument as eager lays it out, or the capture refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.passes import FoldConstants, RemoveInferenceNoops
from tests.helpers import Model, check_graph
from tests.support.planted import captured_of

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
ROWS, STRIDES = (4, 2), (1, 3)


def _written_by_strides(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.as_strided((2,), (3,)).fill_(1)
    return y


@pytest.mark.parametrize(
    ("function", "x"),
    [
        pytest.param(lambda m, x: x.as_strided(ROWS, STRIDES) + 1, X, id="input"),
        pytest.param(lambda m, x: x.as_strided(ROWS, STRIDES) + 1, X.t(), id="input that is not contiguous"),
        pytest.param(lambda m, x: x.exp().as_strided(ROWS, STRIDES), X.t(), id="result laid out so"),
        pytest.param(lambda m, x: x.exp().t().as_strided(ROWS, STRIDES), X, id="transposed"),
        pytest.param(lambda m, x: torch.as_strided_copy(x.exp().t(), ROWS, STRIDES), X, id="copied"),
        pytest.param(lambda m, x: x.exp()[2:].as_strided(ROWS, STRIDES), X, id="part"),
        pytest.param(lambda m, x: x.exp()[2:].as_strided(ROWS, STRIDES, 11), X, id="part, by its memory"),
        pytest.param(lambda m, x: x + m.w.t().as_strided((5,), (3,)), X, id="weight"),
        pytest.param(lambda m, x: x + m.w[2:].as_strided((5,), (2,), 10), X, id="part of a weight"),
        pytest.param(lambda m, x: x.as_strided((0, 9), (99, 9)), X, id="nothing"),
        pytest.param(_written_by_strides, X, id="written"),
    ],
)
def test_it_is_read_as_eager_lays_it_out(function: Any, x: Tensor) -> None:
    original, captured = captured_of(Model(function, w=X.clone()), x)
    program, expected = captured.program, original(x)
    for step in (RemoveInferenceNoops(), FoldConstants()):
        assert torch.equal(program.run(x)[0], expected)
        program = step.apply(program).program
    check_graph(program)
    assert torch.equal(program.run(x)[0], expected)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        pytest.param(lambda m, x: x.exp()[2:].as_strided((5,), (1,), 0), X, id="before a part"),
        pytest.param(lambda m, x: x.exp()[:2].as_strided((5,), (3,)), X, id="behind a part"),
        pytest.param(lambda m, x: x.as_strided((5,), (1,)), X[:, ::2], id="between an input's elements"),
        pytest.param(lambda m, x: x + m.w[:, 0].as_strided((5,), (1,)), X, id="between a weight's elements"),
        pytest.param(lambda m, x: x.as_strided((5,), (1,), 3), X, id="where the caller's memory begins"),
        pytest.param(lambda m, x: x[2:].as_strided((5,), (1,), 10), X, id="where it begins, through a view"),
    ],
)
def test_memory_that_is_not_of_the_arguments_elements_is_refused(function: Any, x: Tensor) -> None:
    with pytest.raises(CaptureError, match=r"as_strided.* \(helpers.py:"):
        captured_of(Model(function, w=X.clone()), x)


def test_sizes_that_values_decide_are_refused() -> None:
    model = Model(lambda m, x: (y := x[x > 0]).as_strided((y.shape[0],), (1,)))
    with pytest.raises(CaptureError, match="more than the sizes of the example"):
        captured_of(model, X)


def test_a_convolution_behind_it_has_its_layout_in_eager() -> None:
    model = Model(lambda m, x: m.c(x).permute(0, 2, 3, 1).as_strided((4, 2), (1, 1)), c=nn.Conv2d(3, 4, 3))
    original, captured = captured_of(model, x := torch.randn(1, 3, 8, 8))
    with torch.no_grad():
        assert torch.equal(captured.program.run(x)[0], original(x))
