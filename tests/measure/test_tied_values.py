"""What hangs on the order of equal values is no fault of a program; whatever does not, is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt.ir.lanes import FP32, LANES
from ampopt.ir.numerics import is_rounded
from ampopt.measure.draws import Draw
from tests.helpers import Model
from tests.support.planted import module_of
from tests.support.verifying import verifier_of

pytest.importorskip("onnxruntime")

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def open_outputs(function: Callable[[Tensor], Any], row: list[float], *, lane: Any = FP32) -> list[int]:
    """The outputs that move where every row of the input is this one."""
    verifier, _ = verifier_of(Model(lambda _, x: function(x)).eval(), X[:, : len(row)])
    draw = Draw("a row", ((torch.tensor([row] * len(X)),),))
    count = len(verifier.captured.program.exit)
    near = lane.limits.always
    return [output for output in range(count) if any(verifier.ties.jumps(draw, output, near))]


def _top3(x: Tensor) -> Any:
    return x.topk(3, dim=-1)


@pytest.mark.parametrize(
    ("function", "row", "expected"),
    [
        (_top3, [5.0, 4.0, 3.0, 2.0, 1.0], []),
        (_top3, [5.0, 4.0, 3.0, 2.0, 2.0], []),  # none of the two is among the largest
        (_top3, [5.0, 4.0, 4.0, 2.0, 1.0], [1]),
        (_top3, [5.0, 4.0, 3.0, 3.0, 1.0], [1]),  # the last, and the first that is left out
        (_top3, [5.0, -torch.inf, -torch.inf, -torch.inf, 1.0], [1]),
        (_top3, [1e9, 4.0, 3.0, 2.0, 1.0], []),
        (_top3, [5.0, 4.0, 4.0 - 1e-5, 2.0, 1.0], [0, 1]),  # rounding may swap them
        (lambda x: x.topk(2, dim=-1, largest=False), [5.0, 5.0, 3.0, 2.0, 1.0], []),
        (lambda x: x.topk(2, dim=-1, largest=False), [5.0, 4.0, 2.0, 2.0, 1.0], [1]),
        (lambda x: x.topk(2, dim=0), [5.0, 4.0, 3.0, 2.0, 1.0], [1]),  # along the equal rows
        (lambda x: x.sort(dim=-1), [5.0, 4.0, 3.0, 2.0, 2.0], [1]),
        (lambda x: x.sort(dim=-1), [5.0, 4.0, 3.0, 2.0, 1.0], []),
        (lambda x: x.sort(dim=-1, stable=True), [5.0, 4.0, 3.0, 2.0, 2.0], []),
        (lambda x: x.sort(dim=-1, stable=False), [5.0, 4.0, 3.0, 2.0, 2.0], [1]),
        (lambda x: x.flip(-1).gather(-1, _top3(x)[1]).sort()[0], [5.0, 4.0, 3.0, 3.0, 1.0], [0]),
        (lambda x: x.argsort(-1, descending=True), [5.0, 4.0, 3.0, 2.0, 2.0], [0]),
        (lambda x: x.kthvalue(2, dim=-1), [5.0, 4.0, 3.0, 3.0, 1.0], [1]),
        (lambda x: x.kthvalue(2, dim=-1, keepdim=True), [5.0, 5.0, 3.0, 2.0, 1.0], []),
        (lambda x: x.median(dim=-1), [5.0, 4.0, 3.0, 3.0, 1.0], [1]),
        (lambda x: x.median(dim=0), [5.0, 4.0, 3.0, 2.0, 1.0], [1]),
        (lambda x: x.mode(dim=-1), [5.0, 4.0, 3.0, 3.0, 1.0], [1]),
        (lambda x: x.max(dim=-1), [5.0, 5.0, 3.0, 3.0, 1.0], []),  # the first of equal ones, as documented
        (lambda x: (x.argmax(-1), x * 2), [5.0, 5.0, 3.0, 3.0, 1.0], []),
        (lambda x: (x.flip(-1).gather(-1, _top3(x)[1]), x * 2), [5.0, 4.0, 4.0, 2.0, 1.0], [0]),
        (lambda x: _top3(x)[0].flip(-1) + 1, [5.0, 4.0, 4.0, 2.0, 1.0], []),
        (lambda x: x.sin(), [5.0, 4.0, 4.0, 2.0, 1.0], []),
    ],
)
def test_places_of_equal_values_are_open_and_nothing_else(
    function: Callable[[Tensor], Any], row: list[float], expected: list[int]
) -> None:
    assert open_outputs(function, row) == expected


def test_a_lane_of_fewer_bits_may_swap_more() -> None:
    row = [5.0, 4.0, 3.999, 2.0, 1.0]
    assert open_outputs(_top3, row) == []
    assert open_outputs(_top3, row, lane=LANES["amp"]["cpu"]) == [0, 1]


class Peaks(nn.Module):
    """The decoder of a detector of centers: the best places of a map of scores, and what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.sizes = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        heat = self.scores(image).sigmoid()
        heat = heat * (F.max_pool2d(heat, 3, 1, 1) == heat)
        best, places = heat.flatten(1).topk(5)
        cells = heat.shape[-2] * heat.shape[-1]
        inside = (places % cells)[:, None].expand(-1, 2, -1)
        return best, places // cells, places % cells, self.sizes(image).flatten(2).gather(2, inside)


def _image(kind: str) -> Tensor:
    image = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    return torch.zeros_like(image) if kind == "zeros" else image


@pytest.mark.parametrize("kind", ["noise", "zeros"])
def test_a_detector_of_centers_has_a_file_and_a_bundle(kind: str, tmp_path: Path) -> None:
    """An image of one colour makes all scores equal: the file was "wrong" with such inputs."""
    model, image = Peaks().eval(), _image(kind)
    fast = module_of(model, image)
    report = fast.export_onnx(tmp_path / "peaks.onnx")
    assert report.reason is None
    fast.save(tmp_path / "peaks.ampopt", tune_s=0.1)
    loaded, other = ampopt.load(tmp_path / "peaks.ampopt"), _image("noise")
    robot = ampopt.robot.load(tmp_path / "peaks.ampopt")
    with torch.no_grad():
        expected = model(other)
    named = robot(other.numpy())
    assert isinstance(named, dict)
    for found in (loaded(other), map(torch.from_numpy, named.values())):
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def _in_order(peaks: Peaks, image: Tensor) -> list[Tensor]:
    """What the model computes, with the first place of equal scores first, as ONNX has it."""
    best, *_ = peaks(image)
    heat = peaks.scores(image).sigmoid()
    heat = heat * (F.max_pool2d(heat, 3, 1, 1) == heat)
    places = heat.flatten(1).sort(descending=True, stable=True).indices[:, :5]
    cells = heat.shape[-2] * heat.shape[-1]
    inside = (places % cells)[:, None].expand(-1, 2, -1)
    return [best, places // cells, places % cells, peaks.sizes(image).flatten(2).gather(2, inside)]


@pytest.mark.parametrize("kind", ["noise", "zeros"])
def test_a_program_with_another_order_of_equal_values_is_right(kind: str) -> None:
    verifier, original = verifier_of(Peaks().eval(), _image(kind))
    assert isinstance(original, Peaks)
    other = verifier.check_errors(lambda image: _in_order(original, image), FP32, everywhere=True)
    assert other.passed, other.reason
    assert not torch.equal(_in_order(original, _image("zeros"))[2], original(_image("zeros"))[2])


class Chosen(nn.Module):
    """Boxes, which are bounded, in the order of scores."""

    def __init__(self, places: Callable[[Tensor], Tensor], *, bounded: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scores, self.boxes = nn.Conv2d(3, 1, 3, padding=1), nn.Conv2d(3, 1, 3, padding=1)
        self.places, self.bounded = places, bounded

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        boxes = self.boxes(image).flatten(1)
        places = self.places(self.scores(image).flatten(1))
        return places, (boxes.clamp(-8, 8) if self.bounded else boxes).gather(1, places)


@pytest.mark.parametrize("size", [24, 40])
@pytest.mark.parametrize(
    "places",
    [
        lambda scores: scores.sort(dim=1, descending=True).indices,
        lambda scores: scores.sigmoid().topk(20).indices,
        lambda scores: scores.softmax(1).topk(20).indices,
        lambda scores: scores.topk(20).indices,
        lambda scores: scores.median(1, keepdim=True).indices,
    ],
)
def test_what_is_wrong_outside_of_the_range_stays_so_where_some_values_are_equal(
    places: Callable[[Tensor], Tensor], size: int
) -> None:
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    verifier, original = verifier_of(Chosen(places).eval(), image)
    unbounded = Chosen(places, bounded=False).eval()

    def scaled(share: float) -> Callable[[Tensor], list[Tensor]]:
        """The original far outside of the example's range by this factor, but for integers."""

        def run(x: Tensor) -> list[Tensor]:
            is_usual = bool(x.abs().max() < 2 * image.abs().max())
            return [y if is_usual or (share and not is_rounded(y)) else share * y for y in original(x)]

        return run

    programs = {"unbounded": lambda x: [*unbounded(x)], "zeros": scaled(0.0), "halves": scaled(0.5)}
    assert verifier.check(lambda x: list(original(x)), FP32, everywhere=True).passed
    for name, program in programs.items():
        assert not verifier.check(program, FP32, everywhere=True).passed, name
    other, free = verifier_of(unbounded, image)
    bounded = Chosen(places).eval()
    assert other.check(lambda x: list(free(x)), FP32, everywhere=True).passed
    assert not other.check(lambda x: list(bounded(x)), FP32, everywhere=True).passed


def test_random_inputs_with_equal_values_are_no_licence() -> None:
    """What holds the example's places as constants is right for the example alone."""
    x = torch.arange(32.0).view(4, 8).roll(3, 1) / 32 - 0.2

    def sparse(x: Tensor) -> Tensor:
        return x.gather(1, (x - 0.5).relu().topk(6).indices)

    verifier, _ = verifier_of(Model(lambda _, x: sparse(x)).eval(), x)
    own = (x - 0.5).relu().topk(6).indices
    assert not verifier.check_errors(lambda x: [x.gather(1, own)], FP32, everywhere=True).passed


@pytest.mark.parametrize("kind", ["noise", "zeros"])
@pytest.mark.parametrize("output", range(4))
def test_a_program_that_takes_other_places_is_wrong(kind: str, output: int) -> None:
    verifier, original = verifier_of(Peaks().eval(), _image(kind))

    def shifted(image: Tensor) -> list[Tensor]:
        results = list(original(image))
        results[output] = results[output].roll(1, dims=-1)
        return results

    assert verifier.check(lambda image: list(original(image)), FP32, everywhere=True).passed
    assert not verifier.check(shifted, FP32, everywhere=True).passed
