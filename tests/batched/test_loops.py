"""The batched forms of loops: bit for bit what the loops give, for what torchvision's own methods do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.batched import keypoints, masks, suppression
from ampopt.batched.loops import batched_loops
from tests.batched.detectors import KINDS, detector, images

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

ROUNDING = {"masks": 1e-6, "keypoints": 2e-5}
"""Sums in another order; places in pixels, where PyTorch divides by a number otherwise than by a tensor."""


def batched(model: nn.Module, is_one_graph: bool = False) -> nn.Module:
    """All forms, those for CUDA among them."""
    found = batched_loops(model, CUDA, is_one_graph=is_one_graph)
    assert found is not None
    return found[0]


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert list(own) == list(other)
        for name in own:
            assert own[name].dtype is other[name].dtype, name
            assert own[name].shape == other[name].shape, name
            rounding = ROUNDING.get(name, 0.0)
            torch.testing.assert_close(own[name], other[name], rtol=0.0, atol=rounding)


@pytest.mark.parametrize("large", [4_000, 40], ids=["moved", "one by one"])
@pytest.mark.parametrize("threshold", [0.05, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("is_one_graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batched_form_gives_what_the_loop_gives(
    kind: str, is_one_graph: bool, threshold: float, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.ops.boxes as boxes

    source = boxes.batched_nms.__code__
    constants = tuple(large if each == 4_000 else each for each in source.co_consts)
    assert 4_000 in source.co_consts
    monkeypatch.setattr(boxes.batched_nms, "__code__", source.replace(co_consts=constants))
    monkeypatch.setattr(suppression, "_LARGE_CPU", large)
    model = detector(kind, threshold)
    form = batched(model, is_one_graph)
    with torch.no_grad():
        for count in (1, 2):
            given = images(count, seed=count)
            assert_same(form(given), model(given))


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_detected_the_graph_is_verified_on_values_of_every_weight(kind: str) -> None:
    model = detector(kind, 1.0)
    with torch.no_grad():
        assert len(model(images())[0]["scores"]) == 0
    graph: Any = batched(model, is_one_graph=True).graph
    found = graph(images())
    first = (found if isinstance(found, list) else found[0])[0]
    beside = [value for name, value in first.items() if name.startswith(suppression.BESIDE)]
    weights = list(graph.parameters())
    for grad in torch.autograd.grad(sum(value.square().sum() for value in beside), weights):
        assert grad.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("is_one_graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_a_batched_form_gives_what_the_loop_gives(
    kind: str, is_one_graph: bool, threshold: float
) -> None:
    model = detector(kind, threshold).cuda()
    form = batched(model, is_one_graph)
    with torch.no_grad():
        for count in (1, 2):
            given = [image.cuda() for image in images(count, seed=count)]
            assert_same(form(given), model(given))


@pytest.mark.parametrize("kind", KINDS)
def test_the_detectors_of_these_tests_find_some_boxes_and_suppress_others(kind: str) -> None:
    model, counts = detector(kind, 0.05), []
    for threshold in (0.3, 1.0):
        owner: Any = getattr(model, "roi_heads", model)
        owner.nms_thresh = threshold
        owner.detections_per_img = 10_000
        with torch.no_grad():
            counts.append(len(model(images())[0]["scores"]))
    assert 0 < counts[0] < counts[1]


def test_without_proposals_nothing_is_detected() -> None:
    model: Any = detector("faster")
    model.rpn.score_thresh = 2.0
    with torch.no_grad():
        found, expected = batched(model)(images()), model(images())
    assert_same(found, expected)
    assert len(found[0]["scores"]) == 0


def test_the_names_of_the_loops_are_told_and_the_model_stays_as_it_was() -> None:
    model = detector("faster")
    kinds = {name: type(module) for name, module in model.named_modules()}
    found = batched_loops(model, CPU)
    assert found is not None
    form, names = found
    assert names == ["RegionProposalNetwork.filter_proposals", "RoIHeads.postprocess_detections"]
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert isinstance(form, type(model))
    assert all(isinstance(module, kinds[name]) for name, module in form.named_modules())


def test_on_a_gpu_every_level_pools_all_boxes() -> None:
    found = batched_loops(detector("mask"), CUDA)
    assert found is not None
    assert "MultiScaleRoIAlign.forward" in found[1]
    assert "GeneralizedRCNNTransform.postprocess" in found[1]


@pytest.mark.parametrize("size", [(40, 60), (9, 5), (1, 1)])
def test_masks_are_pasted_as_one_by_one(size: tuple[int, int]) -> None:
    """Boxes of a part of the image, without area and of all of it; with their borders they reach out."""
    from torchvision.models.detection.roi_heads import paste_masks_in_image

    height, width = size
    generator = torch.Generator().manual_seed(3)
    given = torch.rand(8, 1, 6, 6, generator=generator)
    corners = torch.rand(8, 2, 2, generator=generator).sort(1)[0] * torch.tensor([width, height])
    boxes = corners.reshape(8, 4)
    boxes[0], boxes[1] = torch.tensor([0, 0, width, height]), torch.zeros(4)
    boxes[2], boxes[3] = torch.tensor([width, height] * 2), boxes[4, [0, 1, 0, 1]]
    expected = paste_masks_in_image(given, boxes, size)
    torch.testing.assert_close(masks.pasted(given, boxes, size), expected, rtol=0.0, atol=1e-6)
    assert masks.pasted(given[:0], boxes[:0], size).shape == (0, 1, *size)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keypoints_are_found_as_one_by_one(dtype: torch.dtype, device: str) -> None:
    """Boxes of less than a pixel, of broken sizes, without area; an image without a box; equal values."""
    from torchvision.models.detection.roi_heads import keypointrcnn_inference

    generator = torch.Generator().manual_seed(4)
    maps = torch.rand(9, 3, 7, 7, generator=generator).to(device, dtype)
    maps[2] = 0.5
    corners = torch.rand(9, 2, 2, generator=generator).sort(1)[0] * torch.tensor([60.0, 40.0])
    boxes = corners.reshape(9, 4).to(device, dtype)
    boxes[0], boxes[1] = torch.zeros(4), torch.tensor([3.0, 4.0, 3.5, 20.25])
    given = [boxes[:5], boxes[:0], boxes[5:]]
    expected, found = keypointrcnn_inference(maps, given), keypoints.found_in(maps, given)
    for kind, (own, other) in enumerate(zip(found, expected, strict=True)):
        for mine, its in zip(own, other, strict=True):
            assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
            torch.testing.assert_close(mine, its, rtol=0.0, atol=0.0 if kind else ROUNDING["keypoints"])


def test_keypoints_are_found_where_a_head_needs_gradients() -> None:
    """A head that is not optimized is called in the caller's grad mode."""
    maps, boxes = torch.rand(2, 3, 7, 7, requires_grad=True), torch.tensor([[0.0, 0.0, 9.0, 5.0]] * 2)
    ((points,), (scores,)) = keypoints.found_in(maps, [boxes])
    assert points.shape == (2, 3, 3)
    assert scores.requires_grad


def test_a_loop_of_the_users_own_stays() -> None:
    model: Any = detector("ssd")
    own = type(model)

    class Mine(own):  # type: ignore[misc, valid-type]
        def postprocess_detections(self, *_: Any) -> list[dict[str, Tensor]]:
            return []

    model.__class__ = Mine
    assert batched_loops(model, CPU) is None
    model.__class__ = own
    model.postprocess_detections = lambda *_: []
    assert batched_loops(model, CPU) is None


def test_a_subclass_that_keeps_the_loop_gets_the_form() -> None:
    model: Any = detector("ssd")
    model.__class__ = type("Mine", (type(model),), {})
    form = batched(model)
    assert type(form).__name__ == "Mine"
    with torch.no_grad():
        assert_same(form(images()), model(images()))


def test_a_model_without_such_loops_has_no_form() -> None:
    assert batched_loops(nn.Sequential(nn.Linear(2, 2)), CPU) is None


def _own_forward(self: Any, *given: Any) -> Any:
    return super(type(self), self).forward(*given)


@pytest.mark.parametrize(
    ("kind", "part"), [("ssd", ""), ("faster", "roi_heads"), ("mask", "rpn"), ("fcos", "")]
)
def test_with_code_of_the_users_own_in_it_a_detector_is_no_graph(kind: str, part: str) -> None:
    assert batched_loops(detector(kind), CPU, is_one_graph=True) is not None
    overriding, hooked = detector(kind), detector(kind)
    module: Any = overriding.get_submodule(part)
    module.__class__ = type("Mine", (type(module),), {"forward": _own_forward})
    assert batched_loops(overriding, CPU, is_one_graph=True) is None
    hooked.get_submodule(part).register_forward_hook(lambda *_: None)
    assert batched_loops(hooked, CPU, is_one_graph=True) is None
