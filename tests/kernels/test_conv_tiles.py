"""The tiles that are worth timing: always some, always legal; and which of them share compiled kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampopt.kernels.conv_tiles import FEW_ROWS, Site
from ampopt.kernels.fused_conv import Tile, reference
from tests.support.conv_sites import DEPTHWISE, LINEAR, PLAIN, POINT

CPU = torch.device("cpu")


@st.composite
def _sites(draw: st.DrawFn) -> Site:
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 16, 64]))
    width, outs = draw(st.integers(1, 600)), draw(st.integers(1, 600))
    if draw(st.booleans()):
        width = outs = 1
    pixel = groups * width + draw(st.sampled_from([0, 0, 1, 8]))
    site = dataclasses.replace(
        PLAIN,
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        bias=draw(st.booleans()),
        add=draw(st.booleans()),
        scale=draw(st.booleans()),
        tf32=draw(st.booleans()),
    )
    if draw(st.booleans()):
        rows = draw(st.integers(1, 500))
        return dataclasses.replace(
            site, input_shape=(rows, width), pixel=width, weight_shape=(outs, width), geometry=(), scale=False
        )
    taps = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    geometry = tuple(draw(st.integers(low, 3)) for low in (1, 1, 0, 0, 1, 1))
    size = [geometry[4 + d] * (taps[d] - 1) + 1 + draw(st.integers(0, 60)) for d in (0, 1)]
    shape = (draw(st.integers(1, 4)), groups * width, *size)
    weight_shape = (groups * outs, width, *taps)
    return dataclasses.replace(
        site, input_shape=shape, pixel=pixel, weight_shape=weight_shape, geometry=geometry, groups=groups
    )


def _is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(_sites())
def test_every_site_has_tiles_and_all_are_legal(site: Site) -> None:
    tiles = site.tiles()
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert Tile.parse(str(tile)) == tile
        assert site.fits(tile) or (tile.kind == "depthwise" and site.scale)
        assert all(map(_is_power_of_two, (tile.rows, tile.cols, tile.depth, tile.parts, tile.warps)))
        if tile.kind == "dense":
            assert min(tile.rows, tile.cols, tile.depth) >= 16
            assert tile.precision == ("tf32" if site.tf32 and site.dtype is torch.float32 else "ieee")
        else:
            assert tile.parts == tile.stages == 1
        if tile.kind == "vector":
            assert site.rows <= FEW_ROWS
            assert not site.scale or site.rows == site.input_shape[0]
        assert (tile.kind == "depthwise") == site.is_depthwise


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        pytest.param(PLAIN, False, id="one group"),
        pytest.param(DEPTHWISE, True, id="depthwise"),
        pytest.param(
            dataclasses.replace(PLAIN, weight_shape=(32, 1, 3, 3), groups=16), False, id="two outputs a group"
        ),
        pytest.param(
            dataclasses.replace(PLAIN, weight_shape=(3, 2, 3, 3), groups=3), False, id="two inputs a group"
        ),
        pytest.param(dataclasses.replace(LINEAR, weight_shape=(1, 32)), False, id="linear"),
    ],
)
def test_depthwise_is_one_input_and_one_output_a_group(site: Site, expected: bool) -> None:
    assert site.is_depthwise is expected


@pytest.mark.parametrize(
    ("site", "kinds"),
    [
        pytest.param(PLAIN, {"dense"}, id="taps"),
        pytest.param(DEPTHWISE, {"dense", "depthwise"}, id="depthwise"),
        pytest.param(LINEAR, {"dense", "vector"}, id="linear"),
        pytest.param(POINT, {"dense", "vector"}, id="one pixel an image"),
        pytest.param(dataclasses.replace(POINT, scale=True), {"dense", "vector"}, id="factors"),
        pytest.param(
            dataclasses.replace(POINT, input_shape=(2, 32, 2, 2), scale=True), {"dense"}, id="shared factors"
        ),
        pytest.param(dataclasses.replace(POINT, geometry=(1, 1, 0, 1, 1, 1)), {"dense"}, id="border"),
        pytest.param(dataclasses.replace(POINT, geometry=(2, 1, 0, 0, 1, 1)), {"dense"}, id="stride"),
    ],
)
def test_which_kernels_fit(site: Site, kinds: set[str]) -> None:
    tiles = {kind: Tile(kind, 16, 16, 16) for kind in ("dense", "depthwise", "vector")}
    assert {kind for kind, tile in tiles.items() if site.fits(tile)} == kinds


TILE = Tile("dense", 16, 32, 64)
PARTS = dataclasses.replace(TILE, parts=4)


@pytest.mark.parametrize(
    ("change", "tile", "share"),
    [
        pytest.param({"input_shape": (2, 32, 5, 7)}, TILE, True, id="another size"),
        pytest.param({"geometry": (2, 2, 0, 0, 1, 1)}, TILE, True, id="another stride"),
        pytest.param({"weight_shape": (128, 32, 3, 3)}, TILE, True, id="other outputs"),
        pytest.param({"weight_shape": (60, 32, 3, 3)}, TILE, False, id="outputs in other units"),
        pytest.param({"pixel": 36}, TILE, False, id="pixels in other units"),
        pytest.param({"weight_shape": (64, 32, 3, 1)}, TILE, False, id="other taps"),
        pytest.param({"bias": True}, TILE, False, id="a bias"),
        pytest.param({"act1": "relu"}, TILE, False, id="an activation"),
        pytest.param({"dtype": torch.float32}, TILE, False, id="another dtype"),
        pytest.param({"input_shape": (2, 32, 5, 7)}, PARTS, True, id="parts"),
        pytest.param({"weight_shape": (256, 32, 3, 3)}, PARTS, False, id="another block of combine"),
    ],
)
def test_equal_keys_share_compiled_kernels(change: dict[str, object], tile: Tile, share: bool) -> None:
    other = dataclasses.replace(PLAIN, **change)  # type: ignore[arg-type]
    assert (other.compile_key(tile) == PLAIN.compile_key(tile)) is share


def test_the_number_of_parts_needs_no_kernel_of_its_own() -> None:
    keys = [PLAIN.compile_key(dataclasses.replace(TILE, parts=parts)) for parts in (1, 2, 8)]
    assert keys[1] == keys[2] != keys[0]


def test_depthwise_kernels_differ_by_the_units_of_their_channels() -> None:
    tile = Tile("depthwise", 8, 32)
    other = dataclasses.replace(DEPTHWISE, pixel=20, weight_shape=(20, 1, 3, 3), groups=20)
    assert DEPTHWISE.compile_key(tile) != other.compile_key(tile)


@pytest.mark.parametrize(
    "site",
    [
        dataclasses.replace(PLAIN, bias=True, add=True, pixel=40),
        dataclasses.replace(POINT, scale=True),
        dataclasses.replace(LINEAR, pixel=36, add=True),
        DEPTHWISE,
    ],
)
def test_random_operands_are_as_the_site_says_and_leave_the_random_state_alone(site: Site) -> None:
    before = torch.get_rng_state()
    x, w, b, z, s = site.random_operands(CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert (x.shape, w.shape) == (site.input_shape, site.weight_shape)
    assert x.stride(-1) == (site.pixel if site.geometry else 1)
    assert [t is not None for t in (b, z, s)] == [site.bias, site.add, site.scale]
    y = reference(x, w, b, z, s, site.geometry, site.groups, site.act1, site.act2)
    assert z is None or (z.shape, z.stride()) == (y.shape, y.stride())
    assert y.numel() == site.rows * site.weight_shape[0]


@pytest.mark.parametrize("site", [PLAIN, POINT, LINEAR, DEPTHWISE])
def test_more_of_anything_takes_no_less_time(site: Site) -> None:
    twice = dataclasses.replace(site, input_shape=(2 * site.input_shape[0], *site.input_shape[1:]))
    wide = dataclasses.replace(site, dtype=torch.float32)
    assert 0 < site.least_seconds < twice.least_seconds
    assert site.least_seconds < wide.least_seconds
