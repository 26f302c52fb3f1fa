"""fuse-linear-act: what is matched, what is declined, and on a GPU cuBLASLt's own kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.graph import aten
from ampopt.ir.lanes import FP32, Lane
from ampopt.passes import BakeAutocast, FuseLinearAct
from tests.helpers import BF16, FP16, Model, check_pass, program_of, targets_of


@pytest.fixture
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass work on a CPU: `_addmm_activation` exists there too, unfused."""
    monkeypatch.setattr(FuseLinearAct, "why_not", lambda *_: None)


@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (8,)])
def test_the_rewrite_is_right_wherever_the_operator_runs(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU())
    result = check_pass(FuseLinearAct(), model, torch.randn(shape), rewrites=2)
    assert targets_of(result.program).count(aten._addmm_activation.default) == 2


@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: F.relu(y := m.a(x)) + y, "linear has other readers"),
        (lambda m, x: F.relu(m.b(x)), "linear has no bias"),
        (lambda m, x: F.relu(F.linear(x, m.a.weight * x.mean(), m.a.bias)), "one of the weights is computed"),
        (
            lambda m, x: F.relu(F.linear(x.expand(2, 3, 8), m.a.weight, m.rows)),
            "its weight is no matrix, or its bias not one number for each feature",
        ),
    ],
    ids=["other readers", "no bias", "computed weight", "bias of rows"],
)
def test_it_declines(function: Callable[[Any, Tensor], Tensor], reason: str) -> None:
    model = Model(function, a=nn.Linear(8, 6), b=nn.Linear(8, 6, bias=False), rows=torch.randn(3, 6))
    result = check_pass(FuseLinearAct(), model, torch.randn(3, 8), rewrites=0)
    assert [item.reason for item in result.declined] == [reason]


def test_on_a_cpu_and_under_autocast_it_says_why_not() -> None:
    program = program_of(nn.Linear(8, 6), torch.randn(3, 8), lane=BF16)
    assert FuseLinearAct().why_not(program) == "cuBLASLt's fused epilogues need CUDA"


@pytest.mark.gpu
@pytest.mark.parametrize("lane", [FP32, FP16], ids=lambda lane: lane.name)
@pytest.mark.parametrize("shape", [(512, 64), (1, 64), (2, 7, 64)])
def test_on_a_gpu_it_is_right(shape: tuple[int, ...], lane: Lane) -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 40), nn.ReLU()).cuda()
    x = torch.randn(shape, device="cuda")
    limit = 1e-5 if lane is FP32 else 5e-3
    check_pass(FuseLinearAct(), model, x, rewrites=2, lane=lane, on_top_of=(BakeAutocast(),), limit=limit)
