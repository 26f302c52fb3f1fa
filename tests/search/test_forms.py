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
from ampopt.passes.fold_constants import FoldConstants
from ampopt.search import forms, regions
from ampopt.search.forms import form_of
from ampopt.search.whole_check import WholeCheck
from tests.batched import detectors
from tests.batched.detectors import images

pytestmark = pytest.mark.usefixtures("quick")

CPU = torch.device("cpu")
SSD = ("torchvision.models.detection.ssd", "SSD", "postprocess_detections")


def detector(kind: str) -> nn.Module:
    """One with two feature maps: each more is captured and traced several times."""
    return detectors.detector(kind, levels=2)


def check_of(model: nn.Module) -> WholeCheck:
    return WholeCheck(model, (images(),), {}, CPU, 1e-2)


def comparing(is_real: bool) -> Any:
    """What times two forms, and finds the second so."""
    return lambda *_: SimpleNamespace(gain=SimpleNamespace(is_real=is_real, ratio=3.0))


def found_for(model: nn.Module, is_faster: bool) -> forms.Form:
    with torch.no_grad():
        return form_of(check_of(model), comparing(is_faster), lambda: True)


def test_a_right_and_faster_form_is_told() -> None:
    found = found_for(detector("ssd"), True)
    assert found.model is found.with_loops
    assert found.notes[0] == (
        "the loop in SSD.postprocess_detections: batched, with fixed sizes, the whole is 3.00x faster"
    )


def test_a_right_form_that_is_no_faster_by_itself_stays_a_candidate() -> None:
    model = detector("faster")
    found = found_for(model, False)
    assert found.model is model
    assert found.with_loops is not None
    assert not any("loop" in note for note in found.notes)
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
    model = detector("ssd")
    found = found_for(model, True)
    loops._method.cache_clear()
    assert found.model is model
    assert found.with_loops is None
    told = f"the loop in SSD.postprocess_detections: as before, because batched {why}"
    assert found.notes[0].startswith(told)


def test_on_a_gpu_a_detector_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "AS_GRAPHS", ("cpu",))
    check = check_of(detector("retinanet"))
    with torch.no_grad():
        found = form_of(check, comparing(False), lambda: False)
        assert [region.name for region in found.regions] == ["graph"]
        assert found.model is found.with_loops
        assert check.judge(found.model)[1] is None
    assert found.notes[0].endswith("one graph, whose results are cut to their numbers after it")


def test_a_detector_with_two_names_is_cut_under_both(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = detector("retinanet")

        def forward(self, pixels: list[Tensor]) -> Any:
            return (self.first if len(pixels) == 1 else self.second)(pixels)

    monkeypatch.setattr(forms, "AS_GRAPHS", ("cpu",))
    model = Twice().eval()
    with torch.no_grad():
        found = form_of(check_of(model), comparing(False), lambda: False)
        assert found.notes[0].endswith("one graph, whose results are cut to their numbers after it")
        for count in (1, 2):
            for own, expected in zip(found.model(images(count)), model(images(count)), strict=True):
                assert list(own) == list(expected)
                assert torch.equal(own["boxes"], expected["boxes"])


def test_a_detector_inside_of_a_model_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.detector = detector("fcos")

        def forward(self, pixels: list[Tensor]) -> Any:
            return [own["boxes"] / self.detector.nms_thresh for own in self.detector(pixels)]

    monkeypatch.setattr(forms, "AS_GRAPHS", ("cpu",))
    check = check_of(Around().eval())
    with torch.no_grad():
        found = form_of(check, comparing(False), lambda: False)
        assert [region.name for region in found.regions] == ["detector.graph"]
        assert check.judge(found.model)[1] is None


def detector_of(kind: str) -> nn.Module:
    if kind != "mask and keypoint":
        return detector(kind)
    model, other = detector("keypoint"), detector("mask")
    for name in ("mask_roi_pool", "mask_head", "mask_predictor"):
        setattr(model.roi_heads, name, getattr(other.roi_heads, name))
    return model


@pytest.mark.parametrize(
    ("kind", "can_be_one_graph", "is_faster"),
    [
        ("ssd", True, True),
        ("mask and keypoint", True, False),
        ("ssd", False, True),
        ("faster", False, False),
    ],
)
def test_what_serves_gives_the_original_s_results(
    kind: str, can_be_one_graph: bool, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock says here; and the same after its state is set back."""

    def comparing_briefly(*calls: Any, **_: Any) -> Any:
        found = compare_fairly(*calls, seconds=0.1)
        return dataclasses.replace(found, gain=dataclasses.replace(found.gain, ratio=3.0, low=2.0, high=4.0))

    monkeypatch.setattr("ampopt.system.budget.MARGIN_S", 1e3)  # a busy machine may take long to capture
    monkeypatch.setattr(regions, "compare_fairly", comparing_briefly)
    monkeypatch.setattr(regions, "compare_to_decide", comparing_briefly)
    found_by = lambda check, _, is_over: form_of(check, comparing(is_faster), is_over)  # noqa: E731
    monkeypatch.setattr(regions, "form_of", found_by)
    monkeypatch.setattr(regions, "AS_GRAPHS", ("cpu",))
    monkeypatch.setattr(forms, "AS_GRAPHS", ("cpu",) if can_be_one_graph else ())
    model = detector_of(kind)
    fast = ampopt.optimize(
        model, images(), precision="fp32", passes=(FoldConstants(),), budget_s=60, progress=False, cache=False
    )
    assert fast.report.chosen == "fp32", fast.report.notes
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
            for name in {"boxes", "masks"} & found.keys():
                torch.testing.assert_close(found[name], expected[0][name], rtol=1e-3, atol=1e-3)
