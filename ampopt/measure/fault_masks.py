"""Masks of non-finite outputs: which of them a program loses, and which it adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

Bools = list[list[Tensor]]
"""A boolean mask for each output of each call."""


@dataclasses.dataclass(frozen=True)
class Masks:
    """Masks of the output elements that are not finite in eager: in every run, and in at least one run."""

    always: Bools
    ever: Bools
    roundings: int = 0
    """How many of the runs were ones with changed rounding."""

    @classmethod
    def of(cls, *runs: Bools) -> Masks:
        """The masks of several runs; both hold the elements that are not finite in every run."""
        masks = cls(runs[0], runs[0])
        for run in runs[1:]:
            masks = masks.joined_by(run)
        return cls(masks.always, masks.always)

    def joined_by(self, found: Bools) -> Masks:
        """The masks with one more run included."""
        always = [
            [a & b for a, b in zip(*pair, strict=True)] for pair in zip(self.always, found, strict=True)
        ]
        ever = [[a | b for a, b in zip(*pair, strict=True)] for pair in zip(self.ever, found, strict=True)]
        return Masks(always, ever)

    def unexplained(self, found: Bools) -> int:
        """The number of elements in which what was found is unlike every run."""
        return sum(lost_elements(found, self.always)) + sum(joined_elements(found, self.ever))

    def count(self, index: int) -> int:
        """The number of non-finite elements of an output, over all calls."""
        return sum(int(outputs[index].sum()) for outputs in self.always)


def lost_elements(found: Bools, always: Bools) -> list[int]:
    """For each output, the number of elements that should not be finite but are."""
    calls = [
        [int((b & ~a).sum()) for a, b in zip(*pair, strict=True)] for pair in zip(found, always, strict=True)
    ]
    return [sum(counts) for counts in zip(*calls, strict=True)]


def joined_elements(found: Bools, ever: Bools) -> list[int]:
    """For each output, the number of elements that should be finite but are not."""
    return lost_elements(ever, found)


def share(masks: Bools, index: int) -> float:
    """The share of an output's elements in a mask, in the call with the largest share."""
    return max(float(outputs[index].double().mean()) for outputs in masks)


def not_finite(calls: Sequence[Sequence[Tensor]]) -> Bools:
    """Masks of NaN and infinity in the outputs of each call."""
    return [[~torch.isfinite(output) for output in outputs] for outputs in calls]
