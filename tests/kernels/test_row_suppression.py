"""`ampopt::suppress_rows`: what torchvision's suppression keeps of each row."""

from __future__ import annotations

import pytest
import torch
import torchvision  # noqa: F401 (registers its operators)
from torch import Tensor

from ampopt.kernels import row_suppression
from ampopt.kernels.row_suppression import reference, suppress_rows


def rows(count: int, boxes: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(count + boxes)
    corners = torch.rand(count, boxes, 2, generator=generator) * 20
    found = torch.cat([corners, corners + torch.rand(count, boxes, 2, generator=generator) * 12], 2)
    found[:, ::7] = found[:, ::7].clamp(max=5.0)  # some without area
    return found.to(device, dtype)


def some(count: int, boxes: int, *, device: str = "cpu") -> Tensor:
    return (torch.rand(count, boxes, generator=torch.Generator().manual_seed(1)) < 0.8).to(device)


def one_by_one(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """By torchvision's operator, which waits for the number of boxes, a row at a time."""
    kept = torch.zeros_like(valid)
    for row in range(len(boxes)):
        places = valid[row].nonzero()[:, 0]
        scores = torch.arange(len(places), 0, -1, device=boxes.device, dtype=boxes.dtype)
        found = torch.ops.torchvision.nms(boxes[row, places], scores, threshold)
        kept[row, places[found]] = True
    return kept


SHAPES = [(1, 1), (3, 2), (5, 40), (2, 300), (0, 4), (4, 0)]


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("count", "boxes"), SHAPES)
def test_it_keeps_what_torchvision_keeps(count: int, boxes: int, threshold: float) -> None:
    given, valid = rows(count, boxes), some(count, boxes)
    expected = one_by_one(given, valid, threshold)
    assert torch.equal(suppress_rows()(given, valid, threshold), expected)
    assert torch.equal(reference(given, valid, threshold), expected)


def test_some_boxes_are_kept_and_some_suppressed() -> None:
    kept = suppress_rows()(rows(5, 40), some(5, 40), 0.3)
    assert 0 < int(kept.sum()) < int(some(5, 40).sum())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_boxes_of_lower_precision_are_compared_in_float32(dtype: torch.dtype, device: str) -> None:
    given, valid = rows(3, 40, dtype=dtype).to(device), some(3, 40).to(device)
    expected = suppress_rows()(given.float(), valid, 0.3)
    assert torch.equal(suppress_rows()(given, valid, 0.3), expected)


def test_inputs_stay_as_they_were() -> None:
    given, valid = rows(3, 20), some(3, 20)
    before = given.clone(), valid.clone()
    suppress_rows()(given, valid, 0.3)
    assert torch.equal(given, before[0])
    assert torch.equal(valid, before[1])


def test_its_shape_is_known_without_data() -> None:
    with torch.device("meta"):
        found = suppress_rows()(torch.empty(3, 20, 4), torch.empty(3, 20, dtype=torch.bool), 0.3)
    assert (found.shape, found.dtype) == ((3, 20), torch.bool)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
@pytest.mark.parametrize(("count", "boxes"), [*SHAPES, (90, 300), (3, 5000)])
def test_on_a_gpu_it_keeps_what_torchvision_keeps(
    count: int, boxes: int, threshold: float, dtype: torch.dtype
) -> None:
    given, valid = rows(count, boxes, device="cuda", dtype=dtype), some(count, boxes, device="cuda")
    expected = one_by_one(given, valid, threshold)
    assert torch.equal(suppress_rows()(given, valid, threshold), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_overlap_of_just_the_threshold_is_kept(dtype: torch.dtype) -> None:
    threshold = 0.3  # in float32 it is 0.30000001192..., in float64 it is less
    given = torch.tensor([[[0.0, 0.0, 10.0, 1.0], [0.0, 0.0, 3.0, 1.0]]], dtype=dtype, device="cuda")
    valid = torch.ones(1, 2, dtype=torch.bool, device="cuda")
    for moved in (0.0, torch.finfo(dtype).eps * 2.0, -torch.finfo(dtype).eps * 2.0):
        given[0, 1, 2] = 3.0 * (1.0 + moved)
        expected = reference(given, valid, threshold)
        assert torch.equal(suppress_rows()(given, valid, threshold), expected)


@pytest.mark.gpu
def test_float64_takes_no_step_for_each_box_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(row_suppression, "reference")
    given, valid = rows(3, 40, device="cuda", dtype=torch.float64), some(3, 40, device="cuda")
    assert bool(suppress_rows()(given, valid, 0.3).any())


@pytest.mark.gpu
def test_on_a_gpu_longer_rows_take_pytorchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    given, valid = rows(3, 40, device="cuda"), some(3, 40, device="cuda")
    expected = suppress_rows()(given, valid, 0.3)
    monkeypatch.setattr(row_suppression, "MOST_BOXES", 20)
    assert torch.equal(suppress_rows()(given, valid, 0.3), expected)


@pytest.mark.gpu
def test_a_cuda_graph_can_hold_it() -> None:
    given, valid = rows(4, 60, device="cuda"), some(4, 60, device="cuda")
    expected = suppress_rows()(given, valid, 0.3)
    other = rows(4, 60, device="cuda").flip(1).contiguous()
    expected_of_other = suppress_rows()(other, valid, 0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = suppress_rows()(given, valid, 0.3)
    graph.replay()
    assert torch.equal(kept, expected)
    given.copy_(other)
    graph.replay()
    assert torch.equal(kept, expected_of_other)
