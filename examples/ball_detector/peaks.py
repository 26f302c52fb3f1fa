"""Where heat maps have their peaks, and how far two sets of peaks are apart. It needs no torch.

A heat map is the detector's output: logits [N, 1, H, W], one cell for CELL × CELL pixels of the image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CELL = 4
"""Pixels of the image along each side of a heat map's cell."""
FOUND = 0.5
"""The probability from which a peak is taken for a ball."""
CHANGED = 0.25
"""The change of a peak's probability from which a ball counts as lost, or as found where there is none."""

Floats = NDArray[np.float64]


def peaks(heat_maps: NDArray[Any]) -> tuple[Floats, Floats]:
    """(positions [N, 2] as (x, y) in pixels of the image, probabilities [N]) of the heat maps' peaks.

    Between cells the position is the vertex of the parabola through the log-probabilities of the largest
    cell and its two neighbours, which is exact for a Gaussian. Where two cells are equally large both give
    the same vertex, so that rounding, which makes one or the other the largest, hardly moves the position.
    """
    logits = heat_maps[:, 0].astype(np.float64)
    count, width = len(logits), logits.shape[-1]
    with np.errstate(invalid="ignore"):  # NaN stays NaN, and `distances` judges it
        logs = -np.logaddexp(0.0, -logits)  # log(sigmoid(logits))
    largest = logs.reshape(count, -1).argmax(1)
    rows, columns = np.divmod(largest, width)
    padded = np.pad(logs, ((0, 0), (1, 1), (1, 1)), mode="reflect")  # at an edge: no side
    images, i, j = np.arange(count), rows + 1, columns + 1
    middle = padded[images, i, j]
    x = columns + _vertex(padded[images, i, j - 1], middle, padded[images, i, j + 1])
    y = rows + _vertex(padded[images, i - 1, j], middle, padded[images, i + 1, j])
    centre = (CELL - 1) / 2  # of a cell, where the middle of its first pixel is 0
    return np.stack((x, y), 1) * CELL + centre, np.exp(middle)


def _vertex(before: Floats, middle: Floats, after: Floats) -> Floats:
    """Where, in (-1/2, 1/2), the parabola through three values at -1, 0 and 1 has its maximum, the middle."""
    curvature = 2 * middle - before - after
    flat = curvature <= 0
    return np.where(flat, 0.0, (after - before) / np.where(flat, 1.0, 2 * curvature))


def distances(heat_maps: NDArray[Any], reference: NDArray[Any]) -> Floats:
    """How many pixels each peak lies from the reference's: [N].

    Infinite where the peak's probability is not a number or differs by more than CHANGED: a ball is lost, or
    one is found where there is none. 0 where it does not and the reference has no peak of at least FOUND.
    """
    positions, probabilities = peaks(heat_maps)
    wanted, confidence = peaks(reference)
    moved = np.hypot(*(positions - wanted).T)
    moved = np.where(confidence >= FOUND, moved, 0.0)
    return np.where(np.abs(probabilities - confidence) <= CHANGED, moved, np.inf)
