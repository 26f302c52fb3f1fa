"""How far a lane rounds the values that a choice takes: what another run's may differ by.

A difference is no measure for values that are far smaller: a mask's -1e9 is rounded by more than scores are
large, one image of a batch may have larger scores than another, and a probability of 1e-4 is rounded less
than one of 0.9. So what counts for a value is of its row, or scaled to it, and of values that are not much
larger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

FAR_ABOVE = 1024.0
"""The ratio of the largest magnitude of a row to the next one from which it is a mask's."""

MASKS = 2
"""The number of values that masks of one row may have."""

AS_LARGE = 4.0
"""Values of so many times the magnitude may be rounded alike."""

SAMPLES = 32
"""The least number of values that tell what one is rounded by: near 0 they are rounded as larger ones are."""


@dataclasses.dataclass(frozen=True)
class Roundings:
    """The differences of two runs' values that were taken, and are no mask's.

    `rows` [..., 1] are the largest of each row, `scales` [..., 1] its largest magnitude. `magnitudes`, in
    order, are those of all values, and `largest_up_to` the largest difference of those before each and its.
    """

    rows: Tensor
    scales: Tensor
    magnitudes: Tensor
    largest_up_to: Tensor

    @classmethod
    def of(cls, theirs: Tensor, rows: Tensor, taken: Sequence[Tensor]) -> Roundings:
        """Those at some places [..., chosen], at least one, of the rows [..., values] of two runs."""
        places, scales = torch.cat(list(taken), dim=-1), _unmasked(rows)
        values = rows.gather(-1, places)
        is_masked = values.abs() > scales
        far = differences(theirs.gather(-1, places), values).masked_fill(is_masked, 0)
        magnitudes, order = values.abs().double()[~is_masked].sort()
        return cls(far.amax(-1, keepdim=True), scales, magnitudes, far[~is_masked][order].cummax(0).values)

    @property
    def largest(self) -> float:
        """The largest difference."""
        return float(self.rows.max())

    def of_values(self, magnitudes: Tensor) -> Tensor:
        """What values of these magnitudes [..., chosen] of the same rows may be rounded by."""
        count = len(self.magnitudes)
        if not count:
            return torch.zeros_like(magnitudes)
        number = torch.searchsorted(self.magnitudes, AS_LARGE * magnitudes.contiguous(), right=True)
        alike = self.largest_up_to[number.clamp(min=min(SAMPLES, count)) - 1]
        ratio = torch.where(self.scales > 0, self.rows / self.scales, 0.0).max()
        return torch.minimum(alike, torch.maximum(self.rows, ratio * self.scales))


def _unmasked(rows: Tensor) -> Tensor:
    """The largest magnitude of each row that is no mask's: one that is `FAR_ABOVE` all others.

    A mask's value may be another one in each dtype.
    """
    magnitudes = torch.where(rows.isfinite(), rows.abs(), 0.0).double()
    largest = magnitudes.amax(-1, keepdim=True)
    for _ in range(MASKS):
        rest = magnitudes.masked_fill(magnitudes >= largest, 0).amax(-1, keepdim=True)
        largest = torch.where(largest > FAR_ABOVE * rest, rest, largest)
    return largest


def differences(a: Tensor, b: Tensor) -> Tensor:
    """How far the values of two tensors are apart, in float64; 0 where both have the same infinity."""
    a, b = a.double(), b.double()
    return torch.where(a == b, 0.0, (a - b).abs())


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; 0 for none."""
    far = differences(a, b)
    return float(far.max()) if far.numel() else 0.0
