"""Where the original rounds to TF32 as it is called, lower precision may have twice its own error."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.lanes import LANES
from ampopt.ir.model_copy import private_copy
from ampopt.measure.verify import Verifier
from ampopt.search.lower_parts import LowerParts
from ampopt.search.options import AUTO_TOLERANCE, Options, auto_bound
from ampopt.search.whole_check import WholeCheck
from ampopt.system.flags import cuda_math, rounds_to_tf32
from tests.helpers import with_statistics
from tests.support.lanes import X, measure_as, small_model
from tests.support.planted import optimize

CPU, AMP = torch.device("cpu"), LANES["amp"]["cpu"]


@pytest.fixture
def amp_wins(few_samples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_as(monkeypatch, lambda name: {"best amp": 1.0, "after": 1.0}.get(name, 4.0))


def rounding(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Let the process's setting give the original this relative error, as TF32 does on a GPU."""
    real = Verifier.as_called

    def inexact(self: Verifier, *tensors: Tensor) -> list[Tensor]:
        return [(1 + error) * each for each in real(self, *tensors)]

    monkeypatch.setattr("ampopt.measure.own_errors.rounds_to_tf32", lambda device: True)
    monkeypatch.setattr(Verifier, "as_called", inexact)


@pytest.mark.parametrize(
    ("called", "bound"),
    [
        *((None, AUTO_TOLERANCE), (0.0, AUTO_TOLERANCE), (4e-3, AUTO_TOLERANCE)),
        *((0.03, 0.06), (0.15, 0.2), (math.inf, 0.2)),
    ],
)
def test_twice_the_original_s_error_up_to_a_fifth(called: float | None, bound: float) -> None:
    assert auto_bound(called) == pytest.approx(bound)
    assert Options().bound([AMP, AMP], called) == pytest.approx(bound)


@pytest.mark.parametrize("asked", [{"precision": "amp"}, {"tolerance": 1e-3}, {"metric": lambda a, b: 0.0}])
def test_what_the_user_asks_for_stays(asked: dict[str, Any]) -> None:
    options = Options(**asked)
    lanes = [AMP] if "precision" in asked else [AMP, AMP]
    assert options.bound(lanes, 0.1) == options.bound(lanes) == asked.get("tolerance")


@pytest.mark.usefixtures("amp_wins")
@pytest.mark.parametrize(("called", "chosen"), [(None, "fp32"), (1e-4, "fp32"), (1e-2, "amp")])
def test_a_lane_may_be_as_inexact_as_the_original_is_to_its_caller(
    monkeypatch: pytest.MonkeyPatch, called: float | None, chosen: str
) -> None:
    monkeypatch.setattr("ampopt.search.options.AUTO_TOLERANCE", 5e-4)  # its own in bfloat16 is 3e-3
    if called is not None:
        rounding(monkeypatch, called)
    report = optimize(small_model(), X).report
    assert report.chosen == chosen, str(report)
    told = [note for note in report.notes if "rounds to TF32" in note or "round to TF32" in note]
    if chosen == "amp":
        assert told == [
            "an error of 0.02 is allowed: the original's own is 0.01 as it is called, because the process "
            "lets it round to TF32"
        ]
        assert report.to_dict()["called_error"] == pytest.approx(1e-2, rel=0.01)
    else:
        assert told == []


class Called(nn.Module):
    """A model whose results have an error of their own to their caller, and none where it is verified."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.inner, self.error, self.inexact = nn.Linear(8, 8), error, False

    def forward(self, x: Tensor) -> Tensor:
        """The results."""
        y: Tensor = self.inner(x)
        return y * (1 + self.error * self.inexact)


def check_with(monkeypatch: pytest.MonkeyPatch, error: float, *, is_auto: bool = False) -> WholeCheck:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    check = WholeCheck(private_copy(Called(error).eval()), (x,), {}, CPU, AUTO_TOLERANCE, is_auto=is_auto)
    _ = check._expected, check._in_float64
    check.original.inexact = True  # type: ignore[assignment]
    monkeypatch.setattr("ampopt.search.whole_check.rounds_to_tf32", lambda device: True)
    return check


def answer_with(check: WholeCheck, error: float) -> Callable[..., Any]:
    inner = check.original.get_submodule("inner")
    return lambda x: inner(x) * (1 + error)


@pytest.mark.parametrize(("called", "error"), [(0.03, 0.05), (0.15, 0.19)])
def test_the_whole_in_lower_precision_may_be_so_too(
    monkeypatch: pytest.MonkeyPatch, called: float, error: float
) -> None:
    check = check_with(monkeypatch, called, is_auto=True)
    with torch.no_grad():
        assert check.judge(answer_with(check, error), lower=True)[1] is None
        for worse, lower in ((error, False), (1.3 * error, True)):
            why = check.judge(answer_with(check, worse), lower=lower)[1]
            assert why is not None
            assert "is over " in why


def test_without_a_choice_of_ampopt_s_own_the_whole_has_the_user_s_tolerance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = check_with(monkeypatch, 0.1)
    with torch.no_grad():
        assert check.judge(answer_with(check, 0.05), lower=True)[1] is not None


@pytest.mark.parametrize(("called", "is_known"), [(None, False), (0.03, False), (0.06, True)])
def test_a_part_of_a_whole_without_results_may_be_so_by_its_own_error(
    monkeypatch: pytest.MonkeyPatch, called: float | None, is_known: bool
) -> None:
    check = check_with(monkeypatch, 0.0, is_auto=True)
    monkeypatch.setattr(WholeCheck, "is_empty", True)
    parts = LowerParts(check, check.original, [], [], Options())
    report = SimpleNamespace(lanes={AMP.name: SimpleNamespace(error=0.1)}, called_error=called)
    why = parts._why_not_known(report, AMP)  # type: ignore[arg-type]
    assert (why is None) == is_known
    assert why is None or f"over {auto_bound(called):.2g}," in why


def test_on_a_cpu_nothing_rounds_to_tf32() -> None:
    assert not rounds_to_tf32(CPU)


@pytest.mark.gpu
def test_the_setting_is_the_process_s_own() -> None:
    device = torch.device("cuda")
    for tf32 in (True, False):
        with cuda_math(tf32=tf32, search=False):
            assert rounds_to_tf32(device) == tf32


class Over(nn.Module):
    """Which features are over a threshold: rounding moves some to its other side."""

    def __init__(self) -> None:
        super().__init__()
        self.body = with_statistics(nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)))

    def forward(self, x: Tensor) -> Tensor:
        """1.0 or 0.0."""
        y: Tensor = self.body(x)
        return (y > 0).float()


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [True, False])
def test_on_a_gpu_the_caller_s_tf32_is_the_yardstick(tf32: bool) -> None:
    x = torch.randn(1, 64, 56, 56, generator=torch.Generator().manual_seed(0)).cuda()
    with cuda_math(tf32=tf32, search=False):
        report = optimize(Over().eval().cuda(), x, budget_s=20.0).report
    amp = report.lanes["amp"]
    assert amp.error > AUTO_TOLERANCE
    if tf32:
        assert report.called_error is not None
        assert auto_bound(report.called_error) > AUTO_TOLERANCE
        assert amp.error <= 2 * report.called_error
        assert amp.refused is None
    else:
        assert report.called_error is None
        assert amp.refused is not None
        assert "over the tolerance 0.01" in amp.refused
