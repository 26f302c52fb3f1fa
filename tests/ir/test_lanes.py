"""Which lanes a precision asks for, on which device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ampopt
from ampopt.errors import InputError
from ampopt.ir.lanes import LANES, lanes_for
from ampopt.ir.precisions import LANE_NAMES
from tests.helpers import Model

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("device", "precision", "amp_dtype", "lanes"),
    [
        ("cuda", "auto", None, {"fp32": FULL, "amp": HALF}),
        ("cuda", "amp", None, {"amp": HALF}),
        ("cuda", "bf16", None, {"bf16": BRAIN}),
        ("cuda", "amp", BRAIN, {"bf16": BRAIN}),
        ("cuda", "auto", BRAIN, {"fp32": FULL, "bf16": BRAIN}),
        ("cuda", "fp32,amp,bf16", None, {"fp32": FULL, "amp": HALF, "bf16": BRAIN}),
        ("cuda", "bf16, fp32", None, {"bf16": BRAIN, "fp32": FULL}),
        ("cuda", "amp,bf16", BRAIN, {"bf16": BRAIN}),
        ("cpu", "auto", None, {"fp32": FULL, "amp": BRAIN}),
        ("cpu", "bf16", None, {"amp": BRAIN}),
        ("cpu", "amp,bf16", None, {"amp": BRAIN}),
        ("cpu", "amp", HALF, {"amp": HALF}),
        ("cpu", "amp,bf16", HALF, {"amp": HALF, "bf16": BRAIN}),
    ],
)
def test_a_precision_asks_for_lanes(
    device: str, precision: str, amp_dtype: torch.dtype | None, lanes: dict[str, torch.dtype]
) -> None:
    found = lanes_for(precision, torch.device(device), amp_dtype)
    assert [(lane.name, lane.dtype) for lane in found] == list(lanes.items())


@pytest.mark.parametrize("precision", ["", "fp8", "fp32,", "auto,fp32", "FP32", None, ("fp32",)])
def test_other_precisions_are_refused(precision: Any) -> None:
    with pytest.raises(InputError, match="choose from auto, fp32, amp, bf16, or several"):
        lanes_for(precision, torch.device("cpu"))


def test_every_lane_is_known_by_name_without_pytorch() -> None:
    assert tuple(LANES) == LANE_NAMES


def test_of_several_lanes_the_fastest_within_the_tolerance_is_taken(
    all_kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.search.options.AUTO_TOLERANCE", 1e-4)
    model = Model(lambda m, x: m.b(torch.relu(m.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    options: dict[str, Any] = {"cache": False, "progress": False, "budget_s": 20, "passes": "bake-autocast"}
    with all_kept:
        report = ampopt.optimize(model, X, precision="bf16,fp32", **options).report
        alone = ampopt.optimize(model, X, precision="bf16", **options).report
    assert list(report.lanes) == ["fp32", "amp"]
    assert "accept it with tolerance=" in str(report.lanes["amp"].refused)
    assert report.chosen != "amp"
    assert list(alone.lanes) == ["fp32", "amp"]  # FP32 may answer for it
    assert alone.lanes["amp"].refused is None


@pytest.mark.gpu
def test_on_a_gpu_bfloat16_is_a_lane_of_its_own(all_kept: Any) -> None:
    model = Model(lambda m, x: m.b(torch.relu(m.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).cuda()
    options: dict[str, Any] = {"cache": False, "progress": False, "budget_s": 20, "passes": "bake-autocast"}
    with all_kept:
        report = ampopt.optimize(model, X.cuda(), precision="fp32,bf16", **options).report
    assert {name: lane.dtype for name, lane in report.lanes.items()} == {
        "fp32": "float32",
        "bf16": "bfloat16",
    }
