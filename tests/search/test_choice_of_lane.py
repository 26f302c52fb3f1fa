"""The optimizer chooses between its lanes and the original by their last comparison, and tells why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.headline import Load
from ampopt.measure.report import summary_lines
from ampopt.measure.sampling import Gain, Measurement
from tests.support.lanes import X, measure_as, small_model
from tests.support.planted import optimize

pytestmark = pytest.mark.usefixtures("few_samples")


@pytest.fixture
def model() -> nn.Module:
    return small_model()


@pytest.fixture
def amp_wins(few_samples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final comparison finds the AMP lane twice as fast as FP32, and that twice as fast as before."""
    seconds = {"eager amp": 3.0, "best fp32": 2.0, "best amp": 1.0, "after": 1.0}
    measure_as(monkeypatch, lambda name: seconds.get(name, 4.0))


@pytest.mark.usefixtures("amp_wins")
def test_auto_takes_the_fastest_lane_within_its_tolerance(model: nn.Module) -> None:
    fast = optimize(model, X)
    assert fast.report.chosen == "amp"
    assert fast.report.speedup == 4.0
    assert fast.program.lane.dtype is torch.bfloat16
    assert fast(X).dtype is torch.float32


def test_a_lane_that_is_no_faster_is_not_chosen_over_a_more_exact_one(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_as(monkeypatch, lambda name: 1.0 if name.startswith("best") or name == "after" else 4.0)
    assert optimize(model, X).report.chosen == "fp32"


def test_the_headline_is_of_times_that_the_lane_was_not_chosen_for(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"best fp32": 2.0, "best amp": 0.5, "after": 2.0}
    measure_as(monkeypatch, lambda name: seconds.get(name, 4.0))
    report = optimize(model, X).report
    assert (report.chosen, report.speedup, report.gain) == ("amp", 2.0, Gain(2.0, 2.0, 2.0))
    assert report.lanes["amp"].gain == Gain(8.0, 8.0, 8.0)


def test_what_the_machine_makes_of_the_original_twice_is_taken_off_every_lanes_gain(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"best fp32": 2.0, "best amp": 2.0, "baseline again": 5.0, "before again": 5.0, "after": 2.0}
    measure_as(monkeypatch, lambda name: seconds.get(name, 4.0))
    report = optimize(model, X).report
    assert report.control == Gain(0.8, 0.8, 0.8)
    for found in (report.gain, report.lanes["fp32"].gain):
        assert found is not None
        assert (found.ratio, found.low, found.high) == pytest.approx((2.0, 1.6, 2.5))


def test_a_machine_too_busy_to_tell_is_said_to_be_so_with_its_load(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(samplers: dict[str, Any], **options: Any) -> dict[str, Measurement]:
        wild = {"before": (1.0, 9.0, 1.0, 9.0, 9.0, 9.0), "before again": (9.0, 1.0, 9.0, 1.0, 1.0, 9.0)}
        return {name: Measurement(wild.get(name, (1.0,) * 6)) for name in samplers}

    for module in ("search.last_comparison", "measure.headline"):
        monkeypatch.setattr(f"ampopt.{module}.interleave", measured)
    monkeypatch.setattr("ampopt.measure.headline.load_now", lambda: Load(11.0, 2))
    report = optimize(model, X).report
    assert report.speedup == 1.0
    (line,) = [line for line in summary_lines(report) if line.startswith("result: ")]
    assert "the machine is too busy to tell whether it is faster than as you call it now" in line
    assert "load average 11.0 on 2 cores" in line


class Looking(nn.Sequential):
    """Notes whether its calls are made with the random generators put back after them."""

    repeatable = False
    seen: ClassVar[set[bool]] = set()  # a list that grows would be a state

    def forward(self, x: Tensor) -> Tensor:
        Looking.seen.add(Looking.repeatable)
        result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return result


def test_the_original_is_timed_with_nothing_around_it_that_its_user_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextlib.contextmanager
    def repeatable(device: torch.device) -> Iterator[None]:
        Looking.repeatable = True
        yield
        Looking.repeatable = False

    seen: dict[str, bool] = {}

    def measured(samplers: dict[str, Any], **options: Any) -> dict[str, Measurement]:
        for name, sampler in samplers.items():
            Looking.seen.clear()
            sampler()
            if Looking.seen:
                seen[name] = any(Looking.seen)
        return {name: Measurement((1.0,) * 6) for name in samplers}

    monkeypatch.setattr("ampopt.measure.original.untouched_rng", repeatable)
    for module in ("search.last_comparison", "measure.headline"):
        monkeypatch.setattr(f"ampopt.{module}.interleave", measured)
    optimize(Looking(nn.Conv2d(3, 8, 3), nn.ReLU()), X)
    timed = {"baseline", "baseline again", "eager fp32", "eager amp", "before", "before again"}
    assert seen == dict.fromkeys(timed, False)


def test_the_result_is_timed_as_its_user_calls_it(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    def measured(samplers: dict[str, Any], **options: Any) -> dict[str, Measurement]:
        with monkeypatch.context() as patch:
            patch.setattr(OptimizedModule, "__call__", lambda self, *args: called.append(args))
            for name, sampler in samplers.items():
                called.clear()
                sampler()
                assert bool(called) == (name == "after"), name
        return {name: Measurement((1.0,) * 6) for name in samplers}

    monkeypatch.setattr("ampopt.measure.headline.interleave", measured)
    optimize(model, X)


@pytest.mark.usefixtures("amp_wins")
def test_a_faster_lane_that_is_refused_is_told_loudly_with_what_would_accept_it(model: nn.Module) -> None:
    report = optimize(model, X, tolerance=1e-4).report
    assert report.chosen == "fp32"
    (note,) = [note for note in report.notes if "amp lane would be" in note]
    assert "the amp lane would be at least 2.00x faster still" in note
    assert "REFUSED" in str(report)


@pytest.mark.usefixtures("amp_wins")
def test_what_the_note_says_accepts_the_refused_lane(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.search.options.AUTO_TOLERANCE", 1e-4)
    report = optimize(model, X).report
    (note,) = [note for note in report.notes if "amp lane would be" in note]
    assert "over the tolerance 0.0001" in note
    assert "precision='amp'" in note
    tolerance = float(note.partition("accept it with tolerance=")[2].split()[0])
    assert report.lanes["amp"].error <= tolerance < 2 * report.lanes["amp"].error
    assert optimize(model, X, tolerance=tolerance).report.chosen == "amp"
    assert optimize(model, X, precision="amp").report.chosen == "amp"


@pytest.mark.usefixtures("amp_wins")
@pytest.mark.parametrize(("share", "lane"), [(0.0, "fp32"), (1.0, "amp")])
def test_a_metric_decides(model: nn.Module, share: float, lane: str) -> None:
    def metric(outputs: Tensor, reference: Tensor) -> float:
        error = (outputs.double() - reference.double()).norm() / reference.double().norm()
        return 0.0 if error < 1e-4 else 1.0

    assert optimize(model, X, metric=metric, tolerance=share).report.chosen == lane


def test_where_nothing_is_faster_the_original_answers(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_as(monkeypatch, lambda name: 2.0 if name.startswith("best") or name == "after" else 1.0)
    fast = optimize(model, X)
    assert fast.report.chosen == ORIGINAL
    assert fast.report.speedup == 1.0
    assert fast.report.gain == Gain(0.5, 0.5, 0.5)
    told = "called in turn with it, the best program takes 2.00 times as long"
    assert f"the original answers every call: {told}" in fast.report.notes
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))
        assert torch.equal(fast(X[:1, :, :6]), model(X[:1, :, :6]))
