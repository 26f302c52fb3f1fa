"""The optimizer: lanes, what an earlier call has found, the notes, and what becomes of planted passes."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import VerificationError
from ampopt.measure.entry import ORIGINAL, Verdict
from ampopt.measure.sampling import Gain
from ampopt.search.pass_manager import PassManager
from ampopt.search.trial_timer import TrialTimer
from tests.helpers import Model, with_statistics
from tests.support.planted import Planted, optimize, rewriting

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> nn.Module:
    return with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))


def test_every_pass_of_every_lane_has_a_row(model: nn.Module) -> None:
    report = optimize(model, X).report
    lanes = {lane: [e.name for e in report.entries if e.lane == lane] for lane in ("fp32", "amp")}
    names = {step.name for step in (*ampopt.passes.PIPELINE.rewrites, *ampopt.passes.PIPELINE.launches)} - {
        "allow-tf32"
    }
    assert names <= set(lanes["fp32"])
    assert names <= set(lanes["amp"])
    assert all(entry.reason for entry in report.entries)
    assert set(report.lanes) == {"fp32", "amp"}
    json.dumps(report.to_dict())
    assert "fold-conv-bn" in str(report)


class SlowUnderAutocast(nn.Sequential):
    """A stand-in for a processor without instructions for the lower precision."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            time.sleep(0.6)
        result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return result


def test_a_lane_too_slow_to_be_judged_is_left_out_with_a_note() -> None:
    report = optimize(SlowUnderAutocast(nn.Conv2d(3, 8, 3), nn.ReLU()), X, budget_s=30.0).report
    assert set(report.lanes) == {"fp32"}
    said = "the amp lane was not tried: one call of it takes over"
    assert any(note.startswith(said) for note in report.notes)


def test_a_lane_that_was_too_slow_is_not_called_again_by_the_next_optimize(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    slow = SlowUnderAutocast(nn.Conv2d(3, 8, 3), nn.ReLU())
    optimize(slow, X, budget_s=30.0)
    monkeypatch.setattr("ampopt.search.optimizer.judgeable", lambda *_, **__: pytest.fail("called again"))
    monkeypatch.setattr(PassManager, "recall", lambda manager, state, recipe: True)
    monkeypatch.setattr("ampopt.search.optimizer.gain", lambda before, after: Gain(2.0, 2.0, 2.0))
    report = optimize(slow, X, budget_s=30.0).report
    assert set(report.lanes) == {"fp32"}
    assert any(
        "an earlier call could not judge it (cache=False looks again)" in note for note in report.notes
    )


def test_where_the_budget_is_spent_before_anything_is_tried_nothing_is_kept(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    monkeypatch.setattr("ampopt.system.budget.MARGIN_S", 600.0)  # a machine may be busy
    report = optimize(model, X, budget_s=1e-3).report
    assert {entry.verdict for entry in report.entries} == {Verdict.NOT_TRIED}
    assert list(tmp_path.glob("*.json")) == []


@pytest.fixture
def tuned(
    model: nn.Module,
    all_kept: contextlib.AbstractContextManager[None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> nn.Module:
    """A model that an earlier call has tuned; what won in it is faster than the original later, too."""
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    with all_kept:
        assert len(optimize(model, X, precision="fp32").program.recipe) > 0
    for module in ("optimizer", "last_comparison"):
        monkeypatch.setattr(f"ampopt.search.{module}.gain", lambda before, after: Gain(2.0, 2.0, 2.0))
    return model


def test_what_won_before_is_verified_and_only_timed_beside_the_original(
    tuned: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrialTimer, "time", lambda *_: pytest.fail("timed by itself"))
    report = optimize(tuned, X, precision="fp32").report
    assert any("tuned by an earlier call" in note for note in report.notes)
    assert report.verified
    assert report.lanes["fp32"].best.median > 0
    (entry,) = report.entries
    assert (entry.name, entry.verdict, entry.gain) == ("tuned before", Verdict.KEPT, None)
    assert entry.error is not None


def test_what_won_before_and_is_slower_now_is_tuned_anew(
    tuned: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("optimizer", "last_comparison"):
        monkeypatch.setattr(f"ampopt.search.{module}.gain", lambda before, after: Gain(0.5, 0.5, 0.5))
    report = optimize(tuned, X, precision="fp32").report
    assert "what an earlier call had found is slower than the original now: tuned anew" in report.notes
    assert {"fold-conv-bn", "channels-last"} <= {entry.name for entry in report.entries}
    assert report.chosen == ORIGINAL


def test_an_interrupted_look_at_what_won_before_is_finished(
    tuned: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = iter([KeyboardInterrupt()])

    def interrupted_once(call: object, device: torch.device) -> None:
        for interrupt in checks:
            raise interrupt

    monkeypatch.setattr("ampopt.search.last_comparison.peak_memory", interrupted_once)
    report = optimize(tuned, X, precision="fp32").report
    assert "interrupted: this is the best so far" in report.notes
    assert set(report.lanes) == {"fp32"}
    assert report.chosen == "fp32"


class Slow(nn.Sequential):
    """A network too large for the budget."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.3)
        result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return result


def test_where_no_lane_can_be_judged_the_original_answers() -> None:
    slow = Slow(nn.Conv2d(3, 8, 3), nn.ReLU())
    fast = optimize(slow, X, budget_s=1.5, precision="amp")
    assert fast.report.chosen == ORIGINAL
    assert not fast.report.verified
    assert "nothing was tried" in str(fast.report)
    assert torch.equal(fast(X), slow(X))


class WithoutKernel(nn.Sequential):
    """Has an operator that does not exist below FP32."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("no kernel for Half")
        result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return result


class Overflows(nn.Sequential):
    """Leaves the range of float16 on the way."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x * 1e6)  # type: ignore[no-untyped-call]
        return result * 1e-6


@pytest.mark.parametrize("kind", [WithoutKernel, Overflows])
def test_where_no_lower_precision_can_be_judged_fp32_answers(
    kind: type[nn.Sequential], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, all_kept: Any
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    model = kind(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    options: dict[str, Any] = {"precision": "amp", "amp_dtype": torch.float16, "passes": "channels-last"}
    with all_kept:
        fast = optimize(model, X, **options)
        again = optimize(model, X, **options)
    for report in (fast.report, again.report):
        assert list(report.lanes) == ["fp32"]
        assert any(note.startswith("the amp lane was not tried: ") for note in report.notes)
    assert "precision='amp' is answered in FP32: no lower one could be judged" in fast.report.notes
    assert any("tuned by an earlier call" in note for note in again.report.notes)
    with torch.no_grad():
        assert torch.allclose(fast(X), model(X), atol=1e-5)


@pytest.mark.parametrize(("precision", "lanes"), [("fp32", {"fp32"}), ("amp", {"fp32", "amp"})])
def test_the_lanes_are_those_asked_for_and_fp32_which_may_answer_for_them(
    model: nn.Module, precision: str, lanes: set[str]
) -> None:
    report = optimize(model, X, precision=precision).report
    assert set(report.lanes) == {entry.lane for entry in report.entries} == lanes
    assert report.chosen in (precision, ORIGINAL)


@pytest.mark.parametrize("policy", ["amp", "O1", "O2", "half"])
def test_every_policy_answers_rightly(model: nn.Module, policy: str) -> None:
    fast = optimize(model, X, precision="amp", policy=policy)
    error = (fast(X) - model(X)).norm() / model(X).norm()
    assert 0 <= error < 2e-2


def test_a_float16_that_overflows_is_not_served() -> None:
    model = Model(lambda m, x: m.linear(m.linear(x) * 1e5) * 1e-5, linear=nn.Linear(4, 4)).eval()
    x = torch.randn(2, 4)
    try:
        fast = optimize(model, x, precision="amp", amp_dtype=torch.float16)
    except VerificationError:
        return
    assert torch.isfinite(fast(x)).all()


def test_planted_passes_go_through_the_whole_optimizer(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = (
        Planted("broken", error=ValueError("oops")),
        Planted("wrong", factor=2.0),
        Planted("nan", factor=float("nan")),
    )
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting(planted))
    fast = optimize(model, X, precision="fp32")
    tried = [entry for entry in fast.report.entries if entry.name in ("broken", "wrong", "nan")]
    assert [(e.name, e.verdict) for e in tried] == [
        ("broken", Verdict.FAILED),
        ("wrong", Verdict.REVERTED),
        ("nan", Verdict.REVERTED),
    ]
    assert fast.program.recipe == ()
    assert torch.allclose(fast(X + 1), model(X + 1), atol=1e-5)


def test_an_interruption_gives_the_best_so_far_and_a_note(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = (
        *ampopt.passes.PIPELINE.rewrites[:4],
        Planted("long", error=KeyboardInterrupt()),
        Planted("after"),
    )
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting(planted))
    fast = optimize(model, X)
    assert "interrupted: this is the best so far" in fast.report.notes
    (entry,) = [e for e in fast.report.entries if e.name == "long"]
    assert (entry.verdict, entry.reason) == (Verdict.NOT_TRIED, "interrupted")
    assert "after" not in {e.name for e in fast.report.entries}
    assert torch.allclose(fast(X + 1), model(X + 1), atol=2e-2, rtol=2e-2)


def test_an_interruption_before_anything_was_tried_gives_the_original(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ampopt.search.pass_manager.PassManager.open", interrupt)
    fast = optimize(model, X)
    assert fast.report.chosen == ORIGINAL
    assert "interrupted: this is the best so far" in fast.report.notes
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))


@pytest.mark.parametrize("place", ["run", "_contenders"])
def test_an_error_in_the_search_costs_only_what_comes_after_it(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(f"ampopt.search.optimizer.Search.{place}", fail)
    fast = optimize(model, X, precision="fp32")  # which lane is faster depends on the clock
    note = "the search ended early, by an error in it: ZeroDivisionError: a mistake of ours"
    assert note in fast.report.notes
    assert "the search ended early" in caplog.text
    assert torch.allclose(fast(X), model(X), atol=1e-5)
    assert bool(fast.report.lanes) == (place == "_contenders")  # what the openings have found is there


def test_a_spent_budget_still_gives_a_right_module(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.system.budget.MARGIN_S", 600.0)  # a machine may be busy
    fast = optimize(model, X, budget_s=1e-6)
    assert {e.verdict for e in fast.report.entries} == {Verdict.NOT_TRIED}
    assert {e.reason for e in fast.report.entries} == {"the time budget was spent"}
    assert torch.allclose(fast(X + 1), model(X + 1), atol=2e-2, rtol=2e-2)


def test_a_capture_that_is_wrong_leaves_the_call_to_the_original(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ampopt.ir import lowering

    renamed = dict(lowering._ANY_LAYOUT) | {torch.ops.aten.relu.default: torch.ops.aten.abs.default}
    monkeypatch.setattr("ampopt.ir.lowering._ANY_LAYOUT", renamed)
    fast = optimize(model, X)  # eager runs, so optimize returns something correct
    with torch.no_grad():
        assert torch.allclose(fast(X), model(X), atol=1e-5)


def test_the_progress_line_tells_lane_and_pass(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    ampopt.optimize(model, X, budget_s=1e-6, progress=True, exclude=["compile"])
    assert capsys.readouterr().out == ""
