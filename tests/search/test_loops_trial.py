"""Batched forms of loops are candidates where they are right, and serve where that is faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.batched import loops, ssd
from ampopt.measure.headline import compare_fairly
from ampopt.search import regions
from ampopt.search.loops_trial import with_batched_loops
from ampopt.search.whole_check import WholeCheck
from tests.batched.detectors import detector, images

CPU = torch.device("cpu")
SSD = ("torchvision.models.detection.ssd", "SSD", "postprocess_detections")


def check_of(model: nn.Module) -> WholeCheck:
    return WholeCheck(model, (images(),), {}, CPU, 1e-2)


def comparing(is_real: bool) -> Any:
    """What times two forms, and finds the second so."""
    return lambda *_: SimpleNamespace(gain=SimpleNamespace(is_real=is_real, ratio=3.0))


def test_a_right_and_faster_form_is_told() -> None:
    with torch.no_grad():
        found, notes = with_batched_loops(check_of(detector("ssd")), comparing(True), is_one_graph=False)
    assert found is not None
    assert found.is_faster
    (note,) = notes
    assert note == (
        "the loop in SSD.postprocess_detections: batched, with fixed sizes, the whole is 3.00x faster"
    )


def test_a_right_form_that_is_no_faster_by_itself_stays_a_candidate() -> None:
    with torch.no_grad():
        found, notes = with_batched_loops(check_of(detector("faster")), comparing(False), is_one_graph=False)
    assert found is not None
    assert not found.is_faster
    assert notes == []
    assert found.loops.startswith("the loops in RegionProposalNetwork.filter_proposals, RoIHeads.")


def _wrong(self: Any, *given: Any) -> list[dict[str, Tensor]]:
    return [{name: each + 1 for name, each in own.items()} for own in ssd.detections(self, *given)]


def _failing(*_: Any) -> None:
    raise RuntimeError("no such head")


@pytest.mark.parametrize(
    ("form", "why"), [(_wrong, "the whole model's error"), (_failing, "RuntimeError: no such head")]
)
def test_a_form_that_is_wrong_or_fails_is_none(
    form: Callable[..., Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loops._FORMS_ON_CUDA, SSD, form)
    loops._method.cache_clear()
    with torch.no_grad():
        found, notes = with_batched_loops(check_of(detector("ssd")), comparing(True), is_one_graph=False)
    loops._method.cache_clear()
    assert found is None
    (note,) = notes
    assert note.startswith(f"the loop in SSD.postprocess_detections: as before, because batched {why}")


@pytest.mark.parametrize(
    ("kind", "can_be_one_graph", "is_faster"),
    [
        ("ssd", True, True),
        ("mask", True, True),
        ("keypoint", True, False),
        ("ssd", False, True),
        ("faster", False, False),
    ],
)
def test_what_serves_gives_the_original_s_results(
    kind: str, can_be_one_graph: bool, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock says here; and the same after its state is set back."""

    def tried(check: WholeCheck, _: Any, *, is_one_graph: bool) -> Any:
        if is_one_graph and not can_be_one_graph:
            return None, []
        return with_batched_loops(check, comparing(is_faster), is_one_graph=is_one_graph)

    def comparing_briefly(*calls: Any, **_: Any) -> Any:
        found = compare_fairly(*calls, seconds=0.1)
        return dataclasses.replace(found, gain=dataclasses.replace(found.gain, ratio=3.0, low=2.0, high=4.0))

    monkeypatch.setattr(regions, "compare_fairly", comparing_briefly)
    monkeypatch.setattr(regions, "with_batched_loops", tried)
    monkeypatch.setattr(regions, "BATCHED_AS_GRAPHS", ("cpu",))
    model = detector(kind)
    fast = ampopt.optimize(model, images(), precision="fp32", budget_s=6, progress=False, cache=False)
    assert fast.report.chosen == "fp32"
    assert any("one graph, whose results are cut" in note for note in fast.report.notes) == can_be_one_graph
    told = any("batched, with fixed sizes, the whole is 3.00x" in note for note in fast.report.notes)
    assert told == (is_faster and not can_be_one_graph)
    for seed in (1, 2):
        given = images(1, seed)
        with torch.no_grad():
            expected = model(given)
        for _ in range(2):
            (found,) = fast(given)
            fast.reset_state()
            assert {name: len(each) for name, each in found.items()} == {
                name: len(each) for name, each in expected[0].items()
            }
            torch.testing.assert_close(found["boxes"], expected[0]["boxes"], rtol=1e-3, atol=1e-3)
