"""Assertions about what no input decides leave the graph; a model with others is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.capture import capture
from ampopt.ir.graph import aten, calls
from ampopt.ir.settled_assertions import settle_assertions
from tests.helpers import Model

REFUSED = r"would hold only where|cannot be lowered"
X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))


def _sizes(x: Tensor) -> Tensor:
    """The sizes of two maps with as many pixels as there are rows, written one by one."""
    sizes = torch.empty((2, 2), dtype=torch.long)
    for level, (height, width) in enumerate([(1, x.shape[1] - 2), (2, 1)]):
        sizes[level, 0] = height
        sizes[level, 1] = width
    return sizes


def _all(condition: Tensor) -> None:
    torch._check_tensor_all(condition)


def _of_sizes(x: Tensor) -> Tensor:
    _all(_sizes(x).prod(1).sum() == x.shape[1])
    return x * 2


def _twice(x: Tensor) -> Tensor:
    sizes = _sizes(x)
    _all(sizes >= 1)
    _all(sizes[:, 1].cumsum(0) < torch.tensor([5, 6]))
    return x + sizes.sum()


def _of_a_number(x: Tensor) -> Tensor:
    count = torch.arange(x.shape[1]).sum().item()
    torch._check(count >= 3)
    return x - 1


@pytest.mark.parametrize("function", [_of_sizes, _twice, _of_a_number])
def test_an_assertion_about_constants_leaves_the_graph(function: Callable[[Tensor], Tensor]) -> None:
    """The graph gives what the model does, also for other inputs, and asserts nothing."""
    captured = capture(Model(lambda _, x: function(x)), (X,), {}, torch.device("cpu"))
    graph = captured.program.graph
    assert not list(calls(graph, [aten._assert_scalar.default, aten._is_all_true.default, aten.item.default]))
    for x in (X, -X):
        assert torch.equal(captured.program.run(x)[0], function(x))


class _OfWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        _all(self.weight >= 0.5)
        return x * self.weight


def _of_the_input(x: Tensor) -> Tensor:
    _all(x.abs() < 100)
    return x * 2


def _written_from_the_input(x: Tensor) -> Tensor:
    sizes = _sizes(x)
    sizes[0, 1] = x.abs().sum().long() * 0 + 4
    _all(sizes.prod(1).sum() == x.shape[1])
    return x * 2


def _written_through_a_view(x: Tensor) -> Tensor:
    sizes = _sizes(x)
    row = sizes[0]
    checked = sizes.sum()
    row.copy_(x.abs().sum().long() * 0 + 1)
    _all(sizes.sum() <= checked)
    return x * 2


def _of_unwritten_memory(x: Tensor) -> Tensor:
    sizes = torch.empty((2, 2))
    sizes[0] = 1.0
    _all(sizes == sizes)  # which NaN is not
    return x * 2


def _of_what_is_not_written(x: Tensor) -> Tensor:
    sizes = torch.empty((2, 2), dtype=torch.long)
    sizes[0] = 1
    _all(sizes < 2**62)
    return x * 2


def _stays_asserted(model: nn.Module) -> bool:
    """Whether the capture is refused, as PyTorch 2.14 lets it be, or its graph asserts, as 2.11's does."""
    try:
        graph = capture(model, (X,), {}, torch.device("cpu")).program.graph
    except CaptureError as refused:
        return re.search(REFUSED, str(refused)) is not None
    return bool(list(calls(graph, [aten._assert_scalar.default])))


@pytest.mark.parametrize("function", [_of_unwritten_memory, _of_what_is_not_written])
def test_what_unwritten_memory_decides_is_kept(function: Callable[[Tensor], Tensor]) -> None:
    """It may hold anything in another call."""
    exported = torch.export.export(Model(lambda _, x: function(x)), (X,), strict=False)
    settle_assertions(exported)
    assert list(calls(exported.graph_module, [aten._assert_scalar.default]))


@pytest.mark.parametrize("function", [_of_the_input, _written_from_the_input, _written_through_a_view])
def test_what_an_input_decides_is_kept(function: Callable[[Tensor], Tensor]) -> None:
    """The model raises for other inputs, where a graph without the assertion would answer."""
    assert _stays_asserted(Model(lambda _, x: function(x)))


def test_what_a_weight_decides_is_kept() -> None:
    """Weights may be exchanged."""
    assert _stays_asserted(_OfWeights())


def test_what_does_not_hold_is_the_models_own_error() -> None:
    """It raises at the capture as it does in a call."""

    def fails(_: nn.Module, x: Tensor) -> Tensor:
        _all(_sizes(x).prod(1).sum() > x.shape[1])
        return x * 2

    with pytest.raises(CaptureError, match=r"Expected cond to be True"):
        capture(Model(fails), (X,), {}, torch.device("cpu"))
