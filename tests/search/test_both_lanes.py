"""A submodule that takes most of the time is optimized in FP32 and lower precision at once; empty results."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.lanes import LANES
from ampopt.search import parts_search
from ampopt.search.lower_parts import LowerParts
from ampopt.search.options import Options
from ampopt.search.region import optimize_region
from ampopt.search.whole_check import WholeCheck
from tests.support import two_parts
from tests.support.two_parts import Tolerant, X, lanes_of, made, notes_on

pytestmark = pytest.mark.usefixtures("quick", "at_once")

AMP = LANES["amp"]["cpu"]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    two_parts.are_worth_it(monkeypatch)
    monkeypatch.setattr(parts_search, "MAIN", 0.0)


@pytest.mark.parametrize("why_wrong", [None, "the whole model's error 2 is over 0.01"])
def test_what_takes_most_of_the_time_is_optimized_in_both_lanes_at_once(
    why_wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves in the lane that its search has chosen; in FP32 where the whole is wrong with that."""
    asked = list[str]()

    def in_amp(region: Any, options: Any, *given: Any, **known: Any) -> Any:
        asked.append(options.precision)
        module, was_cut_off = optimize_region(region, options, *given, **known)
        return module if options.precision == "fp32" else _in_amp(module), was_cut_off

    monkeypatch.setattr(parts_search, "optimize_region", in_amp)
    monkeypatch.setattr(LowerParts, "look", _tolerating_all)
    monkeypatch.setattr(LowerParts, "_why_wrong", lambda *_: why_wrong)
    report = made(Tolerant().eval()).report
    if why_wrong is None:
        assert asked == ["amp"] * 2
        assert lanes_of(report) == {"first": "amp", "second": "amp"}
        assert report.chosen == "amp"
        assert notes_on(report, "first") == []
    else:
        assert asked == ["amp", "fp32"] * 2
        assert "amp" not in lanes_of(report).values()
        assert notes_on(report, "first") == [f"submodule first stays in FP32: in amp {why_wrong}"]


class Finding(Tolerant):
    """One that gives the features over a threshold: none of them."""

    def forward(self, x: Tensor) -> Tensor:
        """The features over a threshold."""
        y = super().forward(x)
        return y[y > 1e6]


@pytest.mark.parametrize("error", [0.005, 0.5])
@pytest.mark.parametrize("kind", [Finding, Tolerant])
def test_where_the_whole_gives_nothing_a_part_has_to_be_precise_itself(
    kind: type[nn.Module], error: float
) -> None:
    check = WholeCheck(kind().eval(), (X,), {}, torch.device("cpu"), 1e-2)
    with torch.no_grad():
        assert check.is_empty == (kind is Finding)
        parts = LowerParts(check, check.original, [], [], Options())
        report = SimpleNamespace(lanes={AMP.name: SimpleNamespace(error=error)}, called_error=None)
        why = parts._why_not_known(report, AMP)  # type: ignore[arg-type]
    if kind is Finding and error > 1e-2:
        assert why is not None
        assert why.startswith("its own error 0.5 is over 0.01, and the model's results")
    else:
        assert why is None


def test_a_model_that_gives_nothing_is_told_of() -> None:
    for kind, is_told in ((Finding, True), (Tolerant, False)):
        notes = made(kind().eval()).report.notes
        assert any(note.startswith("the model's results are empty") for note in notes) == is_told, notes


def test_where_the_whole_gives_nothing_the_search_of_both_lanes_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[str]()

    def noting(region: Any, options: Any, *given: Any, **known: Any) -> Any:
        asked.append(options.precision)
        return optimize_region(region, options, *given, **known)

    monkeypatch.setattr(parts_search, "optimize_region", noting)
    monkeypatch.setattr(LowerParts, "look", _tolerating_all)
    made(Finding().eval())
    assert asked == ["fp32,amp"] * 2


def _in_amp(module: Any) -> Any:
    """An optimized module whose search has chosen its program in float16."""
    module.report.chosen = "amp"
    module.report.lanes["amp"] = dataclasses.replace(module.report.lanes["amp"], answered_by=None)
    return module


def _tolerating_all(self: Any, *_: float) -> None:
    self._tolerated = dict.fromkeys(self._asked, self._regions)


def test_what_was_interrupted_in_both_lanes_serves_only_if_the_whole_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut_off(region: Any, options: Any, *given: Any, **known: Any) -> Any:
        return _in_amp(optimize_region(region, options, *given, **known)[0]), True

    monkeypatch.setattr(parts_search, "optimize_region", cut_off)
    monkeypatch.setattr(LowerParts, "look", _tolerating_all)
    for why_wrong, served in ((None, {"first": "amp"}), ("its error is large", {})):
        monkeypatch.setattr(LowerParts, "_why_wrong", lambda *_, why=why_wrong: why)
        report = made(Tolerant().eval()).report
        assert "interrupted: this is the best so far" in report.notes
        assert lanes_of(report) == served
