"""Poolings, scattered means and losses in ONNX Runtime are PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.engines.executable import executable
from ampopt.ir.graph import aten, calls
from ampopt.ir.pooling_forms import FORMS
from ampopt.ir.stable_forms import with_stable_forms
from ampopt.passes import OnnxRuntime
from tests.helpers import Model, program_of
from tests.support.side_by_side import results_by_name, side_by_side

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(1, 4, 9, 10, generator=torch.Generator().manual_seed(0))
INDEX = torch.randint(0, 3, (4, 9), generator=torch.Generator().manual_seed(0))
TRUE = torch.rand(1, 4, 9, 10, generator=torch.Generator().manual_seed(1))


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(x < 1, -math.inf)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "divisor of one image": lambda x: F.avg_pool2d(x[0], (3, 2), 2, (1, 0), divisor_override=7),
    "divisor, beyond": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=5),
    "divisor without padding": lambda x: F.avg_pool2d(x, 2, divisor_override=3, count_include_pad=False),
    "divisor of volumes": lambda x: F.avg_pool3d(x[None], 2, 2, 1, divisor_override=5),
    "no divisor": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "infinities": lambda x: F.max_pool2d(masked(x), 2),
    "infinities, beyond": lambda x: F.max_pool2d(masked(x), 3, 2, 1, ceil_mode=True),
    "infinities and a padding": lambda x: F.max_pool2d(masked(x), 3, 1, 1),
    "infinities of rows": lambda x: F.max_pool1d(masked(x[0]), 2, 2, ceil_mode=True),
    "infinities of volumes": lambda x: F.max_pool3d(masked(x[None]), 2, 2, ceil_mode=True),
    "infinities, pooled twice": lambda x: F.max_pool2d(F.max_pool2d(masked(x), 2), 2),
    "scattered mean": lambda x: x[0, :, 0].scatter_reduce(1, INDEX, x[0, :, :, 0], "mean"),
    "scattered mean of these": lambda x: x[0, :, 0].scatter_reduce(
        1, INDEX, x[0, :, :, 0], "mean", include_self=False
    ),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, TRUE),
    "logits, weighted": lambda x: F.binary_cross_entropy_with_logits(
        x, TRUE, weight=TRUE[0], pos_weight=TRUE[0, 0] * 3, reduction="none"
    ),
    "logits, added": lambda x: F.binary_cross_entropy_with_logits(x, TRUE, reduction="sum"),
}


def test_onnx_runtime_computes_what_eager_does() -> None:
    program = program_of(side_by_side(FUNCTIONS), *[X.clone() for _ in FUNCTIONS])
    run = executable(OnnxRuntime(session=()).apply(program).program)
    spoilt = X.clone()
    spoilt[0, 0, 4, 0] = math.nan
    for x in (X, 100 * X, torch.zeros_like(X), torch.full_like(X, 2.0), spoilt):
        given = [x] * len(FUNCTIONS)
        for name, found, wanted in results_by_name(FUNCTIONS, given, run(*given)):
            torch.testing.assert_close(
                found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True, msg=f"{name}: {{}}".format
            )


def test_every_form_is_used_by_one_of_these() -> None:
    graph = program_of(Model(lambda m, x: tuple(f(x) for f in FUNCTIONS.values())), X).graph
    assert {node.target for node in calls(graph, FORMS)} == FORMS.keys()


def test_poolings_of_activations_are_left_alone() -> None:
    model = Model(
        lambda m, x: F.max_pool2d(torch.cat([y := m.c(x).relu(), F.max_pool2d(y, 3, 1, 1)], 1), 2),
        c=nn.Conv2d(4, 4, 3),
    )
    graph = program_of(model.eval(), X).graph
    assert not any(calls(with_stable_forms(graph, (X,)), [aten.masked_fill.Scalar]))
    first = program_of(Model(lambda m, x: F.max_pool2d(x, 2)), X).graph
    assert any(calls(with_stable_forms(first, (X,)), [aten.masked_fill.Scalar]))
