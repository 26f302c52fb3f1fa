"""A diagnosis as a document: everything that was found is in each format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampopt
from ampopt.diagnosis.finding import Finding
from ampopt.diagnosis.operators import Kernel, Spent
from ampopt.diagnosis.result import Diagnosis
from ampopt.document.render import FORMATS, render
from tests.support.cases import CEILINGS, case_of, taking


def small() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


def test_every_format_has_the_verdict_the_layers_and_the_sweep() -> None:
    found = ampopt.diagnose(small(), torch.randn(2, 3, 12, 12), budget_s=20, batches=(1, 2))
    document = found.document()
    headings = [section.heading for section in document.sections]
    assert "Layers" in headings
    assert "Batch sweep" in headings
    assert document.data == found.to_dict()
    assert [figure.label for figure in document.figures] == [f"{lane}, a call" for lane in found.latency]
    for suffix in FORMATS:
        assert "batch_norm" in render(document, Path(f"report{suffix}")), suffix
    assert render(document, Path("report.html")).count("<svg") >= 2
    assert "conv2d" in (found._repr_html_() or "")


def test_a_findings_heading_has_the_share_only_where_it_costs_one() -> None:
    assert Finding("a", "", lane="amp", share=0.314).mark(" of a call") == "amp, 31% of a call"
    assert Finding("a", "", share=0.001).mark() == "fp32"
    assert Finding("a", "", is_fault=True).mark() == "fp32, fault"


def test_what_there_was_no_time_for_is_one_note_that_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ampopt.system.budget.MARGIN_S", 0.0)  # else it suffices, if ceilings are known
    found = ampopt.diagnose(small(), torch.randn(2, 3, 64, 64), budget_s=0.01)
    (note,) = [note for note in found.notes if note.startswith("not tried for want of time")]
    assert "budget_s=2 may do: " in note
    assert "in the fp32 lane" in note


def test_kernels_their_mean_and_the_gaps_are_told_by_lane(tmp_path: Path) -> None:
    case = case_of(
        small(),
        torch.randn(2, 3, 12, 12),
        spent=lambda _: Spent(2e-3, (Kernel("a", 5e-6), Kernel("b", 7e-6))),
    )
    found = Diagnosis(
        *("net", {"device": "a GPU"}, ("x",), "verdict", (), case.latency, {"fp32": taking(2.5)}, CEILINGS),
        *(case.layers, {}, (), (), 1.0),
    )
    assert found.to_dict()["launches"] == {"fp32": {"kernels": 6, "mean_us": 6.0, "gaps": 0.75}}
    told = "6 kernels of 6 µs in the mean, 75% gaps"
    assert f"a call in fp32: {told}" in str(found)
    assert told in render(found.document(), tmp_path / "r.html")
