"""The ranges of sizes in a manifest: they come back as they were, and false ones are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ampopt.bundle.manifest import RefusedError, decode, encode
from ampopt.bundle.stored_sizes import StoredSizes, read_sizes, stored_sizes, write_sizes
from ampopt.ir.size_range import SizeRange, corners
from tests.support.bundles import fields

BATCH, HEIGHT = SizeRange("batch", 1, 8), SizeRange("height", 200, 300)
SIZES = ({0: BATCH, 2: HEIGHT},)
FILES = {"model.onnx": {"sha256": "a" * 64, "bytes": 3}}


def manifest() -> dict[str, Any]:
    """A manifest of schema 2, whose only input is of shape [1, 3, 224, 224]."""
    found = fields(schema=2, sizes=write_sizes(stored_sizes(SIZES)), files=FILES)
    return copy.deepcopy(found)


def test_ranges_come_back_with_all_four_corners() -> None:
    found = read_sizes(decode(encode(manifest())))
    assert found == StoredSizes(SIZES, tuple(corners(SIZES)))
    assert len(found.corners) == 4


def test_of_many_corners_the_smallest_and_the_largest_are_stored() -> None:
    four = SizeRange("width", 3, 9), SizeRange("channels", 1, 4)
    sizes = ({0: BATCH, 2: HEIGHT, 3: four[0], 1: four[1]},)
    lowest, highest = stored_sizes(sizes).corners
    assert lowest == {"batch": 1, "height": 200, "width": 3, "channels": 1}
    assert highest == {"batch": 8, "height": 300, "width": 9, "channels": 4}


def test_a_manifest_without_sizes_is_of_schema_1_and_static() -> None:
    assert not read_sizes(decode(encode(fields(files=FILES))))


def test_sizes_are_no_field_of_schema_1_and_schema_2_has_them() -> None:
    with pytest.raises(RefusedError, match="'sizes' is no field of this schema"):
        decode(encode(manifest() | {"schema": 1}))
    with pytest.raises(RefusedError, match="sizes or state is missing"):
        decode(encode(fields(schema=2, files=FILES)))


Change = Callable[[dict[str, Any]], object]

ATTACKS: dict[str, tuple[Change, str]] = {
    "no object": (lambda m: m.update(sizes=[]), r"sizes is '\[\]', not an object"),
    "a field too many": (lambda m: m["sizes"].update(code="x"), "sizes is not an object of ranges"),
    "no ranges": (lambda m: m["sizes"].update(ranges=[]), "list of 1 to 4 ranges"),
    "many ranges": (lambda m: m["sizes"].update(ranges=m["sizes"]["ranges"] * 3), "list of 1 to 4 ranges"),
    "a range twice": (lambda m: m["sizes"]["ranges"].append(m["sizes"]["ranges"][0]), "that of another"),
    "a range without an end": (lambda m: m["sizes"]["ranges"][0].pop("high"), "name, low and high"),
    "a range backwards": (lambda m: m["sizes"]["ranges"][0].update(low=9), "from 9 to 8, which is no range"),
    "a size of zero": (lambda m: m["sizes"]["ranges"][0].update(low=0), "from 0 to 8"),
    "a negative size": (lambda m: m["sizes"]["ranges"][0].update(low=-4), "from -4 to 8"),
    "a size that is true": (lambda m: m["sizes"]["ranges"][0].update(low=True), "from True to 8"),
    "a fraction": (lambda m: m["sizes"]["ranges"][0].update(low=1.5), "from 1.5 to 8"),
    "a huge size": (lambda m: m["sizes"]["ranges"][0].update(high=2**40), "no range of sizes"),
    "a huge input": (lambda m: m["sizes"]["ranges"][0].update(high=2**30), r"2\^40 elements"),
    "code for a name": (lambda m: m["sizes"]["ranges"][0].update(name="__import__('os')"), "no name"),
    "a name that is none": (lambda m: m["sizes"]["ranges"][0].update(name=3), "no name"),
    "no dimensions": (lambda m: m["sizes"].update(inputs=[]), "each of the 1 inputs"),
    "a dimension too many": (lambda m: m["sizes"]["inputs"][0].update({"4": "batch"}), "which has 4"),
    "a dimension in other digits": (lambda m: m["sizes"]["inputs"][0].update({"01": "batch"}), "has 4"),
    "a range that is not there": (lambda m: m["sizes"]["inputs"][0].update({"0": "b"}), "'b' that is not in"),
    "a range that is a list": (lambda m: m["sizes"]["inputs"][0].update({"0": []}), "that is not in"),
    "a range of no dimension": (lambda m: m["sizes"]["inputs"][0].pop("2"), "no dimension of the range 'h"),
    "an example outside": (
        lambda m: m["inputs"][0].update(shape=[9, 3, 224, 224]),
        "0 of 'x' is 9",
    ),
    "no corners": (lambda m: m["sizes"].update(corners=[]), "list of 1 to 16 corners"),
    "many corners": (lambda m: m["sizes"].update(corners=m["sizes"]["corners"] * 5), "list of 1 to 16"),
    "a corner twice": (lambda m: m["sizes"]["corners"].append(m["sizes"]["corners"][0]), "a corner twice"),
    "a corner without a size": (lambda m: m["sizes"]["corners"][0].pop("batch"), "a size for each range"),
    "a corner inside": (lambda m: m["sizes"]["corners"][0].update(batch=4), "neither end of batch 1 to 8"),
    "one end alone": (lambda m: m["sizes"].update(corners=m["sizes"]["corners"][:2]), "both ends of batch"),
    "a wider range": (lambda m: m["sizes"]["ranges"][0].update(high=64), "neither end of batch 1 to 64"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_false_range_is_refused(attack: str) -> None:
    change, reason = ATTACKS[attack]
    changed = manifest()
    change(changed)
    with pytest.raises(RefusedError, match=reason):
        decode(encode(changed))


def test_inputs_that_share_a_range_have_one_size_in_the_example() -> None:
    changed = manifest()
    other = {"name": "y", "shape": [2, 5], "dtype": "float32", "layout": "contiguous"}
    changed["inputs"].append(other)
    changed["sizes"]["inputs"].append({"0": "batch"})
    with pytest.raises(RefusedError, match="the batch of 'x' is 1, and that of 'y' is 2"):
        decode(encode(changed))
