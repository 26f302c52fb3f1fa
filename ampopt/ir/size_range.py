"""A range of sizes that have a name in common, and the corners of several; without PyTorch, for the robot."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

MOST_RANGES = 4
"""Largest number of ranges: all corners are verified, and their number doubles with each range."""


@dataclasses.dataclass(frozen=True)
class SizeRange:
    """All sizes from `low` to `high`, both included, of the dimensions that have this name in common."""

    name: str
    low: int
    high: int

    def __contains__(self, size: int) -> bool:
        return self.low <= size <= self.high

    def __str__(self) -> str:
        return f"{self.name} {self.low} to {self.high}"


Sizes = tuple[Mapping[int, SizeRange], ...]
"""For each input tensor, the dimensions that may vary; empty: none of any input."""


def ranges_of(sizes: Sequence[Mapping[int, SizeRange]]) -> tuple[SizeRange, ...]:
    """Each range once, in order."""
    return tuple(dict.fromkeys(each for named in sizes for each in named.values()))


def shown(sizes: Sequence[Mapping[int, SizeRange]]) -> str:
    """The ranges in words: `batch 1 to 8, height 224 to 512`."""
    return ", ".join(map(str, ranges_of(sizes)))


def corners(sizes: Sizes) -> list[dict[str, int]]:
    """All combinations of the ranges' ends, each a size by the range's name."""
    ranges = ranges_of(sizes)
    combined = itertools.product(*(dict.fromkeys((each.low, each.high)) for each in ranges))
    return [dict(zip([each.name for each in ranges], chosen, strict=True)) for chosen in combined]


def between(sizes: Sizes) -> dict[str, int]:
    """A size of each range that is odd, if it has one: at multiples a wrong rule for sizes may hold."""
    middles = {each: (each.low + each.high) // 2 for each in ranges_of(sizes)}
    return {each.name: size | 1 if size | 1 in each else size for each, size in middles.items()}


def why_outside(sizes: Sizes, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str | None:
    """Why inputs of the right ranks are not of sizes in the ranges, in words; None if they are.

    A range that several dimensions have in common is one size in each call.
    """
    seen: dict[str, tuple[str, int]] = {}
    for input_name, named, shape in zip(names, sizes, shapes, strict=True):
        for index, each in named.items():
            size = shape[index]
            if size not in each:
                return (
                    f"{each.name} is {each.low} to {each.high}, and dimension {index} of {input_name!r} "
                    f"is {size}"
                )
            first, other = seen.setdefault(each.name, (input_name, size))
            if size != other:
                return f"the {each.name} of {first!r} is {other}, and that of {input_name!r} is {size}"
    return None
