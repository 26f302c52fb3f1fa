"""Compares what a way to run the detector finds with what the original finds. It needs no torch."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.ball_detector.peaks import CHANGED, FOUND, distances, peaks

NEAR = 1.0
"""Pixels that a peak may move."""
ENOUGH = 0.99
"""The share of the balls whose peak must not move farther."""

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One way to run the detector, compared with the original on the same images.

    `found` counts the images in which it finds a ball, and `lost` and `invented` those in which a ball's
    probability is lower or higher than the original's by more than CHANGED. `near` is the share of the
    balls, found by the original or invented, whose peak is at most NEAR pixels from the original's and
    neither lost nor invented; `farthest` is the largest distance in pixels, infinite where one is.
    """

    name: str
    images: int
    found: int
    near: float
    farthest: float
    lost: int
    invented: int
    milliseconds: float | None

    @property
    def passed(self) -> bool:
        """Whether enough peaks stayed where they were."""
        return self.near >= ENOUGH


def call_in_turn(models: Sequence[Callable[[Array], Array]], images: Array) -> list[tuple[Array, float]]:
    """(heat maps [N, 1, H/4, W/4], median milliseconds of a call) of each model, for images [N, 3, H, W].

    A call takes one image. The models take turns, so that what else the machine does slows down all of them.
    """
    for model in models:
        model(images[:1])  # the first call may do what no later one does
    heat_maps: list[list[Array]] = [[] for _ in models]
    seconds: list[list[float]] = [[] for _ in models]
    for index in range(len(images)):
        for model, found, took in zip(models, heat_maps, seconds, strict=True):
            started = time.perf_counter()
            found.append(model(images[index : index + 1]))
            took.append(time.perf_counter() - started)
    return [
        (np.concatenate(found), 1e3 * statistics.median(took))
        for found, took in zip(heat_maps, seconds, strict=True)
    ]


def compare(name: str, heat_maps: Array, reference: Array, milliseconds: float | None) -> Comparison:
    """Compare heat maps [N, 1, H/4, W/4] with the original's for the same images.

    Images in which neither finds a ball count for nothing: their peaks are noise. Without a ball in any
    image, `near` is 0, for nothing is shown.
    """
    probabilities, confidence = peaks(heat_maps)[1], peaks(reference)[1]
    lost = ~(confidence - probabilities <= CHANGED)  # so that NaN is a ball lost
    invented = probabilities - confidence > CHANGED
    moved = distances(heat_maps, reference)[(confidence >= FOUND) | lost | invented]
    return Comparison(
        name,
        images=len(heat_maps),
        found=int((probabilities >= FOUND).sum()),
        near=float((moved <= NEAR).mean()) if len(moved) else 0.0,
        farthest=float(moved.max(initial=0.0)),
        lost=int(lost.sum()),
        invented=int(invented.sum()),
        milliseconds=milliseconds,
    )


def table(rows: Sequence[Comparison]) -> str:
    """The comparisons as lines of text with a heading."""
    heading = ("", "found", f"moved ≤ {NEAR:g} px", "farthest", "lost", "invented", "ms per image")
    lines = [heading, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))])
        for first, *rest in lines
    )


def _cells(row: Comparison) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.found} of {row.images}",
        f"{row.near:.1%}",
        f"{row.farthest:.2f} px",
        str(row.lost),
        str(row.invented),
        "–" if row.milliseconds is None else f"{row.milliseconds:.2f}",
    )
