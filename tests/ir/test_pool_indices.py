"""Poolings whose indices are read are computed by PyTorch's own kernel, with its indices for NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ampopt.ir.graph import aten, calls, copy_of
from ampopt.ir.model_copy import same_tensor
from ampopt.ir.pool_indices import keep_indices, pooling_operators
from tests.helpers import Model, program_of

X = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(0))
GEOMETRIES: dict[str, dict[str, Any]] = {
    "by default": {"kernel_size": 2},
    "strided": {"kernel_size": (3, 2), "stride": (1, 2)},
    "padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 2, "stride": 1, "dilation": (2, 3)},
    "rounded up": {"kernel_size": 2, "stride": 2, "ceil_mode": True},
}


def kept(function: Any, x: Tensor = X) -> fx.GraphModule:
    module = copy_of(program_of(Model(function), x).graph)
    keep_indices(module)
    module.graph.lint()
    return module


def targets(module: fx.GraphModule) -> list[object]:
    pools = (aten.max_pool2d_with_indices.default, pooling_operators()[aten.max_pool2d_with_indices.default])
    return [node.target for node in calls(module, pools)]


def test_the_operator_is_registered_once() -> None:
    operator = pooling_operators()[aten.max_pool2d_with_indices.default]
    assert pooling_operators()[aten.max_pool2d_with_indices.default] is operator
    assert operator is torch.ops.ampopt.max_pool2d_with_indices.default
    assert operator.name() == "ampopt::max_pool2d_with_indices"


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_a_pooling_whose_indices_are_read_keeps_its_geometry_and_its_indices_of_nan(
    geometry: dict[str, Any],
) -> None:
    x = X.clone()
    x[0, 0, :4, :4] = float("nan")
    module = kept(lambda m, x: F.max_pool2d(x, return_indices=True, **geometry), x)
    assert targets(module) == [pooling_operators()[aten.max_pool2d_with_indices.default]]
    values, indices = module(x)
    expected = F.max_pool2d(x, return_indices=True, **geometry)
    assert same_tensor(values, expected[0])
    assert torch.equal(indices, expected[1])


def test_a_pooling_whose_values_alone_are_read_is_left_to_the_compiler() -> None:
    module = kept(lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0] + 1)
    assert targets(module) == [aten.max_pool2d_with_indices.default]


def test_a_pooling_whose_indices_alone_are_read_is_kept() -> None:
    module = kept(lambda m, x: F.max_pool2d(x, 2, return_indices=True)[1] * 2)
    assert targets(module) == [pooling_operators()[aten.max_pool2d_with_indices.default]]
    assert torch.equal(module(X)[0], F.max_pool2d(X, 2, return_indices=True)[1] * 2)


def test_each_pooling_of_a_graph_is_judged_for_itself_and_a_second_call_changes_nothing() -> None:
    def function(m: Any, x: Tensor) -> Any:
        first = F.max_pool2d(x, 2, return_indices=True)[0]
        second, indices = F.max_pool2d(first, 2, return_indices=True)
        return second, indices

    module = kept(function)
    assert targets(module) == [
        aten.max_pool2d_with_indices.default,
        pooling_operators()[aten.max_pool2d_with_indices.default],
    ]
    assert module.code.count("torch.ops.ampopt.") == 1
    code = module.code
    keep_indices(module)
    assert module.code == code


@pytest.mark.parametrize("geometry", [([2, 2], [2, 2], [0, 0], [1, 1], True), ([3], [], [1], [1], False)])
def test_the_operator_keeps_what_it_promises_to_compilers(geometry: tuple[Any, ...]) -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        pooling_operators()[aten.max_pool2d_with_indices.default], (X, *geometry), test_utils=checks
    )
    empty = torch.empty_like(X, device="meta")
    found = [
        (t.shape, t.dtype)
        for t in pooling_operators()[aten.max_pool2d_with_indices.default](empty, *geometry)
    ]
    assert found == [(t.shape, t.dtype) for t in aten.max_pool2d_with_indices.default(X, *geometry)]


def test_an_adaptive_pooling_keeps_its_indices_of_nan() -> None:
    x = X.clone()
    x[0, 0, :4, :4] = float("nan")
    module = kept(lambda m, x: F.adaptive_max_pool2d(x, (2, 3), return_indices=True), x)
    own = pooling_operators()[aten.adaptive_max_pool2d.default]
    assert [node.target for node in calls(module, [own])] == [own]
    for found, expected in zip(module(x), F.adaptive_max_pool2d(x, (2, 3), return_indices=True), strict=True):
        assert same_tensor(found, expected)
    alone = kept(lambda m, x: F.adaptive_max_pool2d(x, 2))
    assert not any(calls(alone, [own]))
