"""Masks of what a fault leaves in outputs: which of it a program loses, and which it adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ampopt.ir.numerics import is_rounded, relative_error

Bools = list[list[Tensor]]
"""A boolean mask for each output of each call."""

Calls = Sequence[Sequence[Tensor]]
"""The outputs of each call."""


@dataclasses.dataclass(frozen=True)
class Masks:
    """Masks of what a fault leaves in eager's outputs, see `left_in`: in every run, and in at least one."""

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
        """The number of elements of an output that are always marked, over all calls."""
        return sum(int(outputs[index].sum()) for outputs in self.always)


def lost_elements(found: Bools, always: Bools) -> list[int]:
    """For each output, the number of elements that should be marked but are not."""
    calls = [
        [int((b & ~a).sum()) for a, b in zip(*pair, strict=True)] for pair in zip(found, always, strict=True)
    ]
    return [sum(counts) for counts in zip(*calls, strict=True)]


def joined_elements(found: Bools, ever: Bools) -> list[int]:
    """For each output, the number of elements that should not be marked but are."""
    return lost_elements(ever, found)


def share(masks: Bools, index: int) -> float:
    """The share of an output's elements in a mask, in the call with the largest share."""
    return max(float(outputs[index].double().mean()) for outputs in masks)


def left_in(calls: Calls, eager: Calls, exact: Calls) -> Bools:
    """Masks of what a fault leaves in the outputs of each call.

    Of numbers these are NaN and infinity; of integers and booleans, which say what a fault was taken for,
    those that are eager's. Where eager in float64, `exact`, has others they tell nothing.
    """
    return [
        [_left(*three) for three in zip(*outputs, strict=True)]
        for outputs in zip(calls, eager, exact, strict=True)
    ]


def _left(output: Tensor, eager: Tensor, exact: Tensor) -> Tensor:
    return ~torch.isfinite(output) if is_rounded(output) else (output == eager) & (eager == exact)


def with_others(found: Bools, always: Bools, calls: Calls, eager: Calls) -> Bools:
    """The masks with those of the integers and booleans that are not eager's without a fault, either.

    `calls` and `eager` are of inputs without one.
    """
    return [
        [
            mask if is_rounded(o) else mask | (expected & (o != e))
            for mask, expected, o, e in zip(*each, strict=True)
        ]
        for each in zip(found, always, calls, eager, strict=True)
    ]


def finite_errors(calls: Calls, exact: Calls) -> list[float]:
    """The relative error of what is finite in both, for each output, largest over calls; 0 for integers."""
    errors = [
        [_finite_error(output, reference) for output, reference in zip(*outputs, strict=True)]
        for outputs in zip(calls, exact, strict=True)
    ]
    return [max(each) for each in zip(*errors, strict=True)]


def _finite_error(output: Tensor, reference: Tensor) -> float:
    if not is_rounded(output):
        return 0.0
    known = torch.isfinite(output) & torch.isfinite(reference)
    return relative_error(output[known], reference[known])
