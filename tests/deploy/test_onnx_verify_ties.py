"""A file may have another order of equal values than the original, and nothing else for their sake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt.deploy.onnx_export import export_onnx
from ampopt.deploy.onnx_verify import OnnxVerifier, verify_onnx
from ampopt.ir.lanes import FP32
from ampopt.ir.numerics import is_rounded
from tests.helpers import Model
from tests.support.planted import captured_of, module_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


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


def _image(kind: str, size: int = 12) -> Tensor:
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
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


@pytest.mark.parametrize("kind", ["noise", "zeros"])
def test_a_tolerance_takes_no_licence_away(kind: str, tmp_path: Path) -> None:
    original, captured = captured_of(Peaks().eval(), _image(kind))
    report = export_onnx(original, captured, (), tmp_path / "peaks.onnx", tolerance=1e-3)
    assert report.reason is None


class Chosen(nn.Module):
    """Values `taken` of a map at the best places of another one, and maybe the places."""

    def __init__(
        self, places: Callable[[Tensor], Tensor], taken: Callable[[Tensor], Tensor], *, tells: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scores, self.boxes = nn.Conv2d(3, 1, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.places, self.taken, self.tells = places, taken, tells
        with torch.no_grad():
            self.scores.bias.fill_(-0.05)  # type: ignore[union-attr]

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        boxes = self.taken(self.boxes(image)).flatten(2)
        places = self.places(self.scores(image).flatten(1))
        found = boxes.gather(2, places[:, None].expand(-1, 4, -1))
        return (places, found) if self.tells else (found,)


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "sorted": lambda scores: scores.sort(dim=1, descending=True).indices,
    "saturated": lambda scores: F.hardsigmoid(scores).topk(20).indices,
    "positive": lambda scores: scores.relu().topk(20).indices,
    "best": lambda scores: scores.topk(20).indices,
    "median": lambda scores: scores.median(1, keepdim=True).indices,
}

LOST: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "a narrow bound": (lambda boxes: boxes.clamp(-8, 8), lambda boxes: boxes),
    "a bound": (lambda boxes: boxes.clamp(-20, 20), lambda boxes: boxes),
    "a wide bound": (lambda boxes: boxes.clamp(-40, 40), lambda boxes: boxes),
    "a bend": (lambda boxes: torch.where(boxes.abs() > 25, boxes * 0.4, boxes), lambda boxes: boxes),
    "a least norm": (
        lambda boxes: F.normalize(boxes, dim=1, eps=0.05),
        lambda boxes: F.normalize(boxes, dim=1, eps=1e-12),
    ),
}
"""What a model does with its boxes, and what it does where that is lost."""


def _passes(verifier: OnnxVerifier, run: Callable[[Tensor], list[Tensor]]) -> bool:
    """Whether a run is right on all draws."""
    return all(row.passed for row in verifier.outputs(run, FP32, ["a", "b", "c", "d"], "a runtime"))


@pytest.mark.parametrize(
    ("choice", "lost", "tells"),
    [
        ("saturated", "a narrow bound", True),
        ("saturated", "a wide bound", False),
        ("saturated", "a bend", True),
        ("positive", "a bound", False),
        ("positive", "a least norm", True),
        ("positive", "a least norm", False),
    ],
)
def test_a_file_that_lost_something_is_wrong_in_an_order_of_its_own(
    choice: str, lost: str, tells: bool, tmp_path: Path
) -> None:
    """ONNX Runtime takes the first of equal scores: its boxes are others in any case."""
    names = ("places", "boxes") if tells else ("boxes",)
    image, path = _image("noise", 24), tmp_path / "chosen.onnx"
    model, captured = captured_of(Chosen(CHOICES[choice], LOST[lost][0], tells=tells).eval(), image)
    export_onnx(model, captured, (), path)
    assert verify_onnx(path, model, [captured], FP32, names).reason is None
    export_onnx(*captured_of(Chosen(CHOICES[choice], LOST[lost][1], tells=tells).eval(), image), (), path)
    assert verify_onnx(path, model, [captured], FP32, names).reason is not None


@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_that_lost_something_is_wrong_in_the_originals_order(choice: str) -> None:
    """Its errors may be as large as those of another order."""
    image = _image("noise", 24)
    for lost, (kept, changed) in LOST.items():
        original, captured = captured_of(Chosen(CHOICES[choice], kept).eval(), image)
        wrong = Chosen(CHOICES[choice], changed).eval()
        verifier = OnnxVerifier(original, captured, draws=1)
        assert _passes(verifier, lambda x, model=original: list(model(x))), lost  # type: ignore[misc]
        assert not _passes(verifier, lambda x, model=wrong: list(model(x))), lost  # type: ignore[misc]


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_wrong_far_outside_of_the_range_alone_is_wrong(choice: str) -> None:
    """In one output, whose errors are as large as those of another order, or in all."""
    image = _image("noise", 24)
    original, captured = captured_of(Chosen(CHOICES[choice], lambda boxes: boxes).eval(), image)
    verifier = OnnxVerifier(original, captured, draws=1)

    def changed(change: Callable[[int, Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
        def run(x: Tensor) -> list[Tensor]:
            is_usual = bool(x.abs().max() < 2 * image.abs().max())
            return [y if is_usual else change(place, y) for place, y in enumerate(original(x))]

        return run

    changes: list[Callable[[int, Tensor], Tensor]] = [
        lambda _, y: y * 0,
        lambda _, y: y * 0.5 if is_rounded(y) else y,
        lambda place, y: y.flip(1) if place == 1 else y,
        lambda place, y: (y + 1) % 576 if place == 0 else y,
    ]
    assert _passes(verifier, changed(lambda _, y: y))
    for number, change in enumerate(changes):
        assert not _passes(verifier, changed(change)), number


def test_random_inputs_with_equal_values_are_no_licence() -> None:
    """What holds the example's places as constants is right for the example alone."""
    x = torch.arange(32.0).view(4, 8).roll(3, 1) / 32 - 0.2

    def places(x: Tensor) -> Tensor:
        return (x - 0.5).relu().topk(6).indices

    original, captured = captured_of(Model(lambda _, x: x.gather(1, places(x))).eval(), x)
    own = places(x)
    assert not _passes(OnnxVerifier(original, captured, draws=1), lambda x: [x.gather(1, own)])


def test_a_bundle_of_what_other_orders_make_singular_is_saved(tmp_path: Path) -> None:
    """The affine map of the three best places: of an image of one colour, they may lie on a line."""

    def affine(m: Any, x: Tensor) -> Any:
        places = m.scores(x).relu().flatten(1).topk(3).indices
        rows = torch.stack([places // 12, places % 12, torch.ones_like(places)], -1)
        return torch.linalg.inv(rows.float())

    torch.manual_seed(0)
    scores, zeros = nn.Conv2d(3, 1, 3, padding=1), torch.zeros(1, 3, 12, 12)
    path = tmp_path / "affine.ampopt"
    module_of(Model(affine, scores=scores).eval(), zeros).save(path, tune_s=0.1, onnx=None)
    ampopt.load(path)
