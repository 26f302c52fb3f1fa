"""compare: every pass alone, in sequence and left out, in every lane; nothing is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import ampopt
from ampopt.comparison import MODES, ComparedPass
from ampopt.errors import InputError
from ampopt.measure.sampling import Gain, Measurement
from ampopt.passes import PIPELINE
from tests.helpers import Model, with_statistics
from tests.support.planted import NO_ENGINES, Planted, rewriting

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    return with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))


def compared(model: nn.Module, **options: Any) -> ampopt.Comparison:
    """`compare` without engines, and silent."""
    return ampopt.compare(model, X, exclude=NO_ENGINES, progress=False, **options)


def test_every_pass_has_a_row_in_every_mode_and_lane() -> None:
    found = compared(net())
    names = {step.name for step in (*PIPELINE.rewrites, *PIPELINE.launches)} - {"allow-tf32"}
    rows = [(row.lane, row.mode, row.name) for row in found.rows]
    assert len(rows) == len(set(rows))
    assert set(rows) == {(lane, mode, name) for lane in ("fp32", "amp") for mode in MODES for name in names}
    for row in found.rows:
        assert (row.latency is None) == (row.gain is None) == (row.error is None)
        assert row.latency is not None or row.reason
    assert {"fold-conv-bn"} <= {
        row.name for row in found.rows if row.gain is not None and row.mode == "left out"
    }


def test_a_comparison_is_json_and_a_table() -> None:
    found = compared(net(), precision="fp32")
    data = json.loads(json.dumps(found.to_dict()))
    assert len(data["rows"]) == len(found.rows)
    assert data["inputs"] == ["float32[2, 3, 8, 8] on cpu"]
    text = str(found)
    assert "| pass | alone | cumulative | left out |" in text
    for row in found.rows:
        assert f"| {row.name} |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {5}


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (Gain(1.2, 1.15, 1.25), "2.000 (1.20x, 1.15 to 1.25)"),
        (Gain(0.8, 0.75, 0.85), "2.000 (0.80x, 0.75 to 0.85)"),
        (Gain(1.3, 0.98, 1.4), "2.000 (no difference: 0.98 to 1.40)"),
        (Gain(1.004, 1.001, 1.007), "2.000 (no difference: 1.00 to 1.01)"),
        (Gain(2.55, 1.01, 6.0), "2.000 (too busy to tell: 1.01 to 6.00)"),
    ],
)
def test_a_cell_says_no_more_than_was_measured(gain: Gain, said: str) -> None:
    row = ComparedPass("fp32", "alone", "fold-conv-bn", Measurement((0.002,) * 6), gain, 1e-7)
    text = str(ampopt.Comparison("Net", {"device": "a CPU"}, (), (row,), 1.0))
    assert f"| fold-conv-bn | {said} | – | – |" in text


def test_a_pass_that_changes_nothing_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting((Planted("fine"),)))
    seconds = {"before": (3.0, 2.0, 3.0, 2.0, 3.0, 2.0), "before again": (2.0, 3.0, 2.0, 3.0, 2.0, 3.0)}

    def measured(samplers: dict[str, Any], **options: Any) -> dict[str, Measurement]:
        return {name: Measurement(seconds.get(name, (2.0,) * 6)) for name in samplers}

    monkeypatch.setattr("ampopt.measure.headline.interleave", measured)
    (row,) = [r for r in compared(net(), precision="fp32").rows if (r.name, r.mode) == ("fine", "alone")]
    assert row.gain is not None
    assert row.gain.ratio == 1.25
    assert not row.gain.is_real


def test_a_pass_that_fails_or_is_wrong_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = (Planted("broken", error=ValueError("oops")), Planted("wrong", factor=2.0), Planted("fine"))
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting(planted))
    rows = {(r.name, r.mode): r for r in compared(net(), precision="fp32").rows}
    assert rows["broken", "alone"].reason == "failed: oops"
    assert "error 1 is over" in rows["wrong", "alone"].reason
    assert rows["fine", "alone"].reason == ""


def test_one_broken_pass_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = (Planted("broken", error=ValueError("oops")), Planted("fine"))
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting(planted))
    rows = {(r.name, r.mode): r for r in compared(net(), precision="fp32").rows}
    assert rows["fine", "cumulative"].gain is not None
    assert rows["fine", "left out"].gain is not None


def test_a_spent_budget_is_told_in_every_row() -> None:
    assert {row.reason for row in compared(net(), budget_s=1e-6).rows} == {"not tried: no time left"}


def test_a_model_that_is_no_single_graph_is_refused() -> None:
    model = Model(lambda m, x: m.c(x) if x.sum() > 0 else x, c=nn.Conv2d(3, 3, 1))
    with pytest.raises(InputError, match="compare needs a model that is one graph"):
        compared(model)


def test_what_a_pass_says_when_it_fails_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Planted("failing", error=ValueError("one | two\nthree"))
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting((failing,)))
    text = compared(net(), precision="fp32", budget_s=5).to_markdown()
    (line,) = [line for line in text.splitlines() if line.startswith("| failing")]
    assert "failed: one \\| two three" in line
