"""Masks of non-finite outputs: which of them a program loses, and which it adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

Bools = list[list[Tensor]]
"""A mask for each output of each call."""


@dataclasses.dataclass(frozen=True)
class Masks:
    """Which elements of the outputs of each call are not finite in eager: each time, and at least once."""

    always: Bools
    ever: Bools
    rounded: bool = False
    """Whether eager was rounded anew to learn that."""

    @classmethod
    def of(cls, *runs: Bools) -> Masks:
        """The masks of runs of which each has to agree that an element is not finite."""
        masks = cls(runs[0], runs[0])
        for run in runs[1:]:
            masks = masks.joined_by(run)
        return cls(masks.always, masks.always)

    def joined_by(self, found: Bools) -> Masks:
        """The masks with what another run gave."""
        always = [
            [a & b for a, b in zip(*pair, strict=True)] for pair in zip(self.always, found, strict=True)
        ]
        ever = [[a | b for a, b in zip(*pair, strict=True)] for pair in zip(self.ever, found, strict=True)]
        return Masks(always, ever)

    def count(self, index: int) -> int:
        """How many elements of an output are not finite, in all calls."""
        return sum(int(outputs[index].sum()) for outputs in self.always)


def lost_elements(found: Bools, always: Bools) -> list[int]:
    """For each output how many elements of it should not be finite and are."""
    calls = [
        [int((b & ~a).sum()) for a, b in zip(*pair, strict=True)] for pair in zip(found, always, strict=True)
    ]
    return [sum(counts) for counts in zip(*calls, strict=True)]


def joined_elements(found: Bools, ever: Bools) -> list[int]:
    """For each output how many elements of it should be finite and are not."""
    return lost_elements(ever, found)


def share(masks: Bools, index: int) -> float:
    """The share of an output that a mask marks, in the call where that is most."""
    return max(float(outputs[index].double().mean()) for outputs in masks)


def not_finite(calls: Sequence[Sequence[Tensor]]) -> Bools:
    """Where the outputs of each call are NaN or infinite."""
    return [[~torch.isfinite(output) for output in outputs] for outputs in calls]
