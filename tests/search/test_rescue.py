"""Lanes that are wrong at first are made right before anything else, or left out with the evidence."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.pipeline import Pipeline
from ampopt.measure.entry import Verdict
from ampopt.measure.ledger import Ledger
from ampopt.measure.verify import Verifier
from ampopt.passes import PIPELINE
from ampopt.search.lane_state import LaneState
from ampopt.search.pass_manager import PassManager
from ampopt.search.rescue import in_order, rescued
from ampopt.search.subject import Subject
from tests.helpers import BF16, FP16
from tests.support import overflowing
from tests.support.overflowing import IMAGE, TOKENS
from tests.support.planted import Planted, captured_of, optimize

pytestmark = pytest.mark.usefixtures("quick")


class Opened:
    """A lane that was just opened, and what `rescued` says about it."""

    def __init__(self, model: nn.Module, x: Tensor, lane: Lane, pipeline: Pipeline, **options: Any) -> None:
        original, captured = captured_of(model.eval(), x)
        self.verifier, self.ledger = Verifier(original, captured, **options), Ledger("model", {}, ())
        self.passes, self.notes = pipeline.rewrites, list[str]()
        deadline = time.perf_counter() + 60.0
        self.manager = PassManager(captured.program, self.verifier, self.ledger, deadline=deadline)
        self.state: LaneState = self.manager.open(lane)
        self.is_right = rescued(self.manager, self.state, self.verifier, self.passes, self.notes)

    @property
    def recipe(self) -> list[str]:
        return [step.name for step in self.state.best.program.recipe]


@pytest.mark.parametrize("lane", [FP32, BF16], ids=["fp32", "bfloat16"])
def test_a_lane_that_is_right_is_left_as_it_is(lane: Lane) -> None:
    opened = Opened(overflowing.one_branch(), torch.randn(IMAGE), lane, PIPELINE)
    assert opened.is_right
    assert opened.recipe == opened.notes == []
    assert opened.ledger.entries == []


def test_folded_norms_alone_can_make_a_lane_right() -> None:
    opened = Opened(overflowing.branches(), torch.randn(IMAGE), FP16, PIPELINE)
    assert opened.is_right
    assert opened.recipe == ["fold-conv-bn", "bake-autocast"]
    assert opened.verifier.check(opened.state.best.run, FP16).passed
    (entry,) = opened.ledger.entries
    assert (entry.name, entry.verdict) == ("bake-autocast", Verdict.KEPT)
    assert entry.reason == "it makes the lane right behind fold-conv-bn"
    assert opened.notes == ["the amp lane is right with the rewrites that need no precision before its casts"]


def test_else_operators_stay_in_fp32_and_the_report_names_them() -> None:
    opened = Opened(overflowing.attention(), torch.randn(TOKENS), FP16, PIPELINE)
    assert opened.is_right
    assert opened.recipe == ["keep-fp32"]
    assert opened.verifier.check(opened.state.best.run, FP16).passed
    assert [entry.verdict for entry in opened.ledger.entries] == [Verdict.REVERTED, Verdict.KEPT]
    (note,) = opened.notes
    assert note.startswith("the amp lane is right with 1 operator in FP32: matmul (")
    assert ") overflows: largest 1" in note
    assert "bf16" not in note


def test_a_lane_that_cannot_be_made_right_is_left_out_with_the_evidence() -> None:
    opened = Opened(overflowing.everything(), torch.randn(IMAGE), FP16, PIPELINE)
    assert not opened.is_right
    assert opened.recipe == []
    (note,) = opened.notes
    assert note.startswith(
        "the amp lane was not tried: eager itself is too inexact in it: output 0: error inf"
    )
    assert "; keep-fp32 does not help: the program: 5 of its 5 matrix products and convolutions" in note


NO_KEEPING = PIPELINE.without("keep-fp32")


@pytest.mark.parametrize(("options", "stays"), [({}, False), ({"tolerance": 1e-6}, True)])
def test_without_the_pass_only_a_users_own_bound_keeps_a_wrong_lane_open(
    options: dict[str, float], stays: bool
) -> None:
    opened = Opened(overflowing.everything(), torch.randn(IMAGE), FP16, NO_KEEPING, **options)
    assert opened.is_right == stays
    assert len(opened.notes) == (0 if stays else 1)


def test_a_lane_that_no_mix_brings_within_a_tolerance_stays_open_to_be_told_about() -> None:
    """The last comparison refuses it with how fast it would be and what would accept it."""
    opened = Opened(nn.Linear(8, 4), torch.randn(2, 8), BF16, PIPELINE, tolerance=1e-4)
    assert opened.is_right
    assert opened.recipe == []
    assert opened.notes == []
    (row,) = [entry for entry in opened.ledger.entries if entry.name == "keep-fp32"]
    assert "1 of its 1 matrix products and convolutions would have to stay in FP32" in row.reason


def test_a_users_own_rewrite_that_is_wrong_does_not_cost_the_lane() -> None:
    pipeline = PIPELINE.before("bake-autocast", Planted("twice", factor=2.0))
    opened = Opened(overflowing.attention(), torch.randn(TOKENS), FP16, pipeline)
    assert opened.is_right
    assert opened.recipe == ["keep-fp32"]


def test_what_made_a_lane_right_comes_first_in_its_recipes() -> None:
    opened = Opened(overflowing.attention(), torch.randn(TOKENS), FP16, PIPELINE)
    names = [step.name for step in in_order(opened.state, opened.passes)]
    assert names[:2] == ["keep-fp32", "remove-inference-noops"]
    assert sorted(names) == sorted(step.name for step in opened.passes)
    start = Subject(opened.state.base)
    untouched = LaneState(FP16, start, start, opened.state.base)
    assert in_order(untouched, opened.passes) == list(opened.passes)


def test_settling_never_takes_away_what_made_the_lane_right() -> None:
    """A pass that is wrong far outside is found behind it."""
    opened = Opened(overflowing.attention(), torch.randn(TOKENS), FP16, PIPELINE)
    opened.manager.settle(opened.state)
    assert opened.recipe == ["keep-fp32"]
    assert opened.state.check is not None
    assert opened.state.check.passed


def test_a_lane_that_overflows_is_optimized_and_answers() -> None:
    x = torch.randn(TOKENS)
    model = overflowing.attention()
    fast = optimize(model, x, precision="amp", amp_dtype=torch.float16, budget_s=20.0, cache=False)
    lane = fast.report.lanes["amp"]
    assert lane.refused is None
    assert lane.answered_by == "fp32" or lane.passes[0] == "keep-fp32"
    assert lane.error < 2e-3
    assert any("1 operator in FP32: matmul" in note for note in fast.report.notes)
    rows = [e.verdict for e in fast.report.entries if (e.lane, e.name) == ("amp", "keep-fp32")]
    assert rows == [Verdict.KEPT]
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), rtol=2e-2, atol=2e-2)
        other = torch.randn(3, *TOKENS[1:])
        assert torch.allclose(fast(other), model(other), rtol=2e-2, atol=2e-2)


def test_where_no_lower_precision_is_right_fp32_answers() -> None:
    fast = optimize(
        overflowing.everything(),
        torch.randn(IMAGE),
        precision="amp",
        amp_dtype=torch.float16,
        budget_s=10.0,
        cache=False,
    )
    assert list(fast.report.lanes) == ["fp32"]
    assert any("precision='amp' is answered in FP32" in note for note in fast.report.notes)


def test_a_tolerance_below_that_of_plain_amp_is_met_by_a_mix() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    x = torch.randn(8, 32)
    original, captured = captured_of(model.eval(), x)
    own = Verifier(original, captured).own_error(BF16)
    fast = optimize(model, x, precision="bf16", tolerance=0.5 * own, budget_s=20.0, cache=False)
    lane = fast.report.lanes["amp"]  # bfloat16 on a CPU
    rows = [e.verdict for e in fast.report.entries if (e.lane, e.name) == ("amp", "keep-fp32")]
    assert rows == [Verdict.KEPT]
    assert lane.error <= 0.5 * own
    assert lane.refused is None


def test_a_recipe_in_the_cache_is_recalled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    x, options = torch.randn(TOKENS), {"precision": "amp", "amp_dtype": torch.float16, "budget_s": 15.0}
    first = optimize(overflowing.attention(), x, **options)
    again = optimize(overflowing.attention(), x, **options)
    assert again.report.lanes["amp"].passes == first.report.lanes["amp"].passes
    row = next(entry for entry in again.report.entries if entry.name == "tuned before")
    assert row.verdict is Verdict.KEPT
    assert row.error is not None
    assert row.error < 2e-3


def test_a_bundle_holds_the_mix(tmp_path: Any) -> None:
    x = torch.randn(TOKENS)
    options: dict[str, Any] = {
        "precision": "amp",
        "amp_dtype": torch.float16,
        "budget_s": 15.0,
        "cache": False,
    }
    fast = optimize(overflowing.attention(), x, **options)
    fast.save(tmp_path / "mix.ampopt")
    loaded: Any = ampopt.load(tmp_path / "mix.ampopt")
    with torch.no_grad():
        assert torch.allclose(loaded(x), fast(x), rtol=1e-3, atol=1e-3)


def test_auto_brings_a_lane_within_its_own_tolerance_where_that_can_be() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)))
    original, captured = captured_of(model.eval(), torch.randn(8, 32))
    verifier, ledger = Verifier(original, captured), Ledger("model", {}, ())
    manager = PassManager(captured.program, verifier, ledger, deadline=time.perf_counter() + 60.0)
    state, bound, notes = manager.open(BF16), 0.65 * verifier.own_error(BF16), list[str]()
    assert rescued(manager, state, verifier, PIPELINE.rewrites, notes, bound)
    assert state.founded
    assert state.graph is state.best
    assert verifier.check(state.best.run, BF16).error <= bound
    assert "operators in FP32" in notes[0]


def test_a_lane_that_is_right_stays_where_no_mix_is_within_the_bound() -> None:
    model, x = overflowing.one_branch().eval(), torch.randn(IMAGE)
    original, captured = captured_of(model, x)
    verifier, ledger = Verifier(original, captured), Ledger("model", {}, ())
    manager = PassManager(captured.program, verifier, ledger, deadline=time.perf_counter() + 60.0)
    state, notes = manager.open(BF16), list[str]()
    assert rescued(manager, state, verifier, PIPELINE.rewrites, notes, 1e-9)
    assert (state.founded, notes) == (0, [])
