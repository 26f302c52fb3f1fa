"""The last comparison: FP32 answers for a lane of lower precision where it is faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.measure.headline import Compared
from ampopt.measure.sampling import Measurement, gain
from tests.support.lanes import Remembering, X, measure_as, small_model
from tests.support.planted import optimize

pytestmark = pytest.mark.usefixtures("few_samples")


@pytest.fixture
def model() -> nn.Module:
    return small_model()


@pytest.fixture
def fp32_wins(few_samples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"best fp32": 1.0, "best amp": 2.0, "after": 1.0}
    measure_as(monkeypatch, lambda name: seconds.get(name, 4.0))


@pytest.mark.usefixtures("fp32_wins")
@pytest.mark.parametrize("precision", ["amp", "bf16", "auto", "fp32,amp"])
def test_no_lane_is_slower_than_fp32(model: nn.Module, precision: str) -> None:
    fast = optimize(model, X, precision=precision)
    lanes = fast.report.lanes
    assert lanes["amp"].best.median == lanes["fp32"].best.median == 1.0
    assert lanes["amp"].answered_by == "fp32"
    assert lanes["amp"].error == lanes["fp32"].error
    assert lanes["fp32"].answered_by is None
    assert fast.program.lane.name == "fp32"
    assert fast(X).dtype is torch.float32
    assert "the fp32 lane's program, which is faster: " in str(fast.report)
    with torch.no_grad():
        assert torch.allclose(fast(X), model(X), atol=1e-5)


@pytest.mark.usefixtures("fp32_wins")
def test_the_fp32_program_that_answers_for_amp_serves_new_shapes_and_is_cached(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    for _ in range(2):
        fast = optimize(model, X, precision="amp")
        assert fast.report.chosen == "amp"
        other = X[:1, :, :6]
        with torch.no_grad():
            assert torch.allclose(fast(other), model(other), atol=1e-5)
    assert any("tuned by an earlier call" in note for note in fast.report.notes)


def test_a_lane_that_is_faster_answers_itself(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"best fp32": 2.0, "best amp": 1.0, "after": 1.0}
    measure_as(monkeypatch, lambda name: seconds.get(name, 4.0))
    report = optimize(model, X, precision="amp").report
    assert report.lanes["amp"].answered_by is None
    assert report.lanes["amp"].best.median == 1.0


@pytest.mark.usefixtures("fp32_wins")
def test_a_lane_that_is_refused_for_its_error_is_not_hidden_behind_fp32(model: nn.Module) -> None:
    report = optimize(model, X, precision="auto", tolerance=1e-5).report
    assert report.lanes["amp"].refused is not None
    assert report.lanes["amp"].answered_by is None
    assert report.chosen == "fp32"


@pytest.mark.parametrize("rounds", [6, 9])
def test_a_refused_lane_is_compared_with_the_original_in_its_own_rounds(
    model: nn.Module, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is faster; the original's times beside the winner were taken at another time."""
    measure_as(monkeypatch, lambda name: 1.0 if name == "best amp" else 2.0)

    def compared(*_: Any, **__: Any) -> Compared:
        before, after = Measurement((1.0,) * rounds), Measurement((2.0,) * rounds)
        return Compared(before, after, gain(before, after), None)

    monkeypatch.setattr("ampopt.search.last_comparison.compare_fairly", compared)
    report = optimize(model, X, precision="auto", tolerance=1e-5).report
    assert report.chosen == "original"
    assert report.verified
    assert any(note.startswith("the amp lane would be at least 2.00x faster still") for note in report.notes)


def test_where_a_named_lane_is_refused_fp32_answers_with_the_reason(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_as(monkeypatch, lambda name: 1.0 if name.startswith("best") or name == "after" else 4.0)
    fast = optimize(model, X, precision="amp", tolerance=1e-5)
    assert fast.report.chosen == "fp32"
    assert "FP32 answers for amp, which could not be verified" in fast.report.notes
    with torch.no_grad():
        assert torch.allclose(fast(X), model(X), atol=1e-5)


class TwoOutputs(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.conv(x))
        return {"map": y.relu(), "mean": y.mean((2, 3))}


class Counting(TwoOutputs):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.count += 1
        return {**super().forward(x), "count": self.count * 2}


@pytest.mark.parametrize(("kind", "outputs"), [(TwoOutputs, 2), (Counting, 3)])
def test_the_error_of_each_output_and_both_graphs_are_written_down(kind: type, outputs: int) -> None:
    fast = optimize(kind().eval(), torch.randn(1, 3, 16, 16), precision="fp32", cache=False)
    lane = fast.report.lanes["fp32"]
    assert len(lane.outputs) >= outputs  # and the state's
    assert {each.shape for each in lane.outputs} >= {(1, 8, 14, 14), (1, 8)}
    assert max(each.error for each in lane.outputs) <= lane.error
    assert all(0 <= each.error < 1e-4 for each in lane.outputs)
    before, after = fast.report.graphs
    assert any("batch_norm(" in line for line in before)
    assert len(after) <= len(before)


def test_a_state_that_is_kept_under_autocast_is_not_given_to_the_call_in_fp32() -> None:
    fast = optimize(Remembering().eval(), torch.randn(2, 8), precision="auto", cache=False)
    assert set(fast.report.lanes) == {"fp32", "amp"}
    assert not [note for note in fast.report.notes if "failed" in note]
