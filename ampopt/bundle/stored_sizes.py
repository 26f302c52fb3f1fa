"""The ranges of sizes that a bundle's program is for, as its manifest has them. No PyTorch.

`ranges` names each range with its ends, `inputs` has the range of each dimension that varies, `corners` the
sizes that the self-test has inputs and outputs for, besides the example's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ampopt.ir.size_range import MOST_RANGES, SizeRange, Sizes, corners, ranges_of, why_outside

MOST_STORED = 4
"""Largest number of corners whose inputs and outputs are all stored; else those of the smallest and the
largest sizes are. All were verified before the bundle was written."""

LARGEST_SIZE = 2**31
MOST_ELEMENTS = 2**40
"""Fewer than these are in an input, as in the manifest's shapes."""


@dataclasses.dataclass(frozen=True)
class StoredSizes:
    """The ranges by input and dimension, and the corners that the self-test holds; none: static sizes."""

    sizes: Sizes = ()
    corners: tuple[Mapping[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(ranges_of(self.sizes))


def stored_sizes(sizes: Sizes) -> StoredSizes:
    """What a bundle for these ranges stores."""
    if not ranges_of(sizes):
        return StoredSizes()
    found = corners(sizes)
    return StoredSizes(sizes, tuple(found if len(found) <= MOST_STORED else (found[0], found[-1])))


def in_corner(number: int, tensor: str) -> str:
    """The name in the self-test's file of a tensor of a corner; `tensor` is its name in the example's."""
    return f"corner{number}.{tensor}"


def write_sizes(stored: StoredSizes) -> dict[str, Any]:
    """The manifest's `sizes`."""
    return {
        "ranges": [dataclasses.asdict(each) for each in ranges_of(stored.sizes)],
        "inputs": [{str(index): each.name for index, each in named.items()} for named in stored.sizes],
        "corners": [dict(corner) for corner in stored.corners],
    }


def read_sizes(manifest: Mapping[str, Any]) -> StoredSizes:
    """What `write_sizes` wrote into a manifest whose other fields are valid; nothing where it has no `sizes`.

    Raises ValueError with the reason for anything that it does not write.
    """
    if "sizes" not in manifest:
        return StoredSizes()
    data, listed = manifest["sizes"], manifest["inputs"]
    if not isinstance(data, dict) or data.keys() != {"ranges", "inputs", "corners"}:
        raise ValueError("sizes is not an object of ranges, inputs and corners")
    ranges = _ranges(data["ranges"])
    sizes = _inputs(data["inputs"], ranges, [entry["shape"] for entry in listed])
    if unused := ranges.keys() - {each.name for each in ranges_of(sizes)}:
        raise ValueError(f"sizes.inputs has no dimension of the range {min(unused)[:40]!r}")
    shapes = [entry["shape"] for entry in listed]
    if reason := why_outside(sizes, [entry["name"] for entry in listed], shapes):
        raise ValueError(f"the example is not in sizes.ranges: {reason}")
    return StoredSizes(sizes, _corners(data["corners"], ranges))


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value < LARGEST_SIZE


def _ranges(data: object) -> dict[str, SizeRange]:
    if not isinstance(data, list) or not 1 <= len(data) <= MOST_RANGES:
        raise ValueError(f"sizes.ranges is not a list of 1 to {MOST_RANGES} ranges")
    found: dict[str, SizeRange] = {}
    for place, item in enumerate(data):
        where = f"sizes.ranges[{place}]"
        if not isinstance(item, dict) or item.keys() != {"name", "low", "high"}:
            raise ValueError(f"{where} is not an object of name, low and high")
        name, low, high = item["name"], item["low"], item["high"]
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 200 or name in found:
            raise ValueError(f"{where}.name is {str(name)[:40]!r}, no name, or that of another range")
        if not _is_size(low) or not _is_size(high) or low > high:
            raise ValueError(
                f"{where} is from {str(low)[:40]} to {str(high)[:40]}, which is no range of sizes"
            )
        found[name] = SizeRange(name, low, high)
    return found


def _inputs(data: object, ranges: Mapping[str, SizeRange], shapes: Sequence[Sequence[int]]) -> Sizes:
    if not isinstance(data, list) or len(data) != len(shapes):
        raise ValueError(f"sizes.inputs is not a list with an object for each of the {len(shapes)} inputs")
    found: list[dict[int, SizeRange]] = []
    for place, (item, shape) in enumerate(zip(data, shapes, strict=True)):
        where = f"sizes.inputs[{place}]"
        dimensions = {str(index): index for index in range(len(shape))}
        if not isinstance(item, dict) or not item.keys() <= dimensions.keys():
            raise ValueError(f"{where} is not an object by dimensions of the input, which has {len(shape)}")
        if unknown := [name for name in item.values() if not isinstance(name, str) or name not in ranges]:
            raise ValueError(f"{where} names a range {str(unknown[0])[:40]!r} that is not in sizes.ranges")
        named = {dimensions[index]: ranges[name] for index, name in item.items()}
        if math.prod(named[i].high if i in named else size for i, size in enumerate(shape)) >= MOST_ELEMENTS:
            raise ValueError(f"{where} lets the input have 2^40 elements or more")
        found.append(named)
    return tuple(found)


def _corners(data: object, ranges: Mapping[str, SizeRange]) -> tuple[Mapping[str, int], ...]:
    """The corners: distinct, and both ends of each range in one of them, so that a self-test reaches it."""
    if not isinstance(data, list) or not 1 <= len(data) <= 2**MOST_RANGES:
        raise ValueError(f"sizes.corners is not a list of 1 to {2**MOST_RANGES} corners")
    for place, item in enumerate(data):
        where = f"sizes.corners[{place}]"
        if not isinstance(item, dict) or list(item) != list(ranges):
            raise ValueError(f"{where} is not an object with a size for each range")
        for name, size in item.items():
            if type(size) is not int or size not in (ranges[name].low, ranges[name].high):
                raise ValueError(f"{where}.{name[:40]} is {str(size)[:40]}, neither end of {ranges[name]}")
    if any(one == other for one, other in itertools.combinations(data, 2)):
        raise ValueError("sizes.corners has a corner twice")
    for each in ranges.values():
        if {item[each.name] for item in data} != {each.low, each.high}:
            raise ValueError(f"sizes.corners does not have both ends of {each}")
    return tuple(data)
