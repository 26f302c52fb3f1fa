"""Which tile is the fastest at a place: all are compiled at once, and only those that are right are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.errors import PassError
from ampopt.ir.settings import Settings
from ampopt.kernels import conv_timing
from ampopt.kernels.conv_tiles import Operands, Site
from ampopt.kernels.fused_conv import Tile, reference
from ampopt.measure.sampling import Measurement
from tests.support.conv_sites import DEPTHWISE, LINEAR, PLAIN, POINT

CPU = torch.device("cpu")
CONV_RELU = dataclasses.replace(PLAIN, act1="relu")
CONV_ADD_RELU = dataclasses.replace(PLAIN, add=True, act2="relu")
EXCITED = dataclasses.replace(POINT, scale=True, act1="hardswish")


def test_each_kernel_is_compiled_once_and_one_may_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[Site, Tile]] = []

    def launch(site: Site, operands: Operands, tile: Tile) -> torch.Tensor:
        launched.append((site, tile))
        raise RuntimeError("no room")

    monkeypatch.setattr(conv_timing, "launch", launch)
    twin = dataclasses.replace(PLAIN, geometry=(1, 1, 1, 1, 1, 1), input_shape=(1, 32, 9, 7))
    done = conv_timing.compile_all([PLAIN, twin], CPU, 60.0)
    keys = [site.compile_key(tile) for site, tile in launched]
    assert len(set(keys)) == len(keys)
    assert done == set(keys) == {s.compile_key(t) for s in (PLAIN, twin) for t in s.tiles()}


def test_where_time_is_short_every_site_has_its_first_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Site, Tile]] = []
    monkeypatch.setattr(conv_timing, "COMPILERS", 1)
    monkeypatch.setattr(conv_timing, "launch", lambda site, operands, tile: launched.append((site, tile)))
    sites = [PLAIN, DEPTHWISE, LINEAR]
    conv_timing.compile_all(sites, CPU, 60.0)
    assert launched[:3] == [(site, site.tiles()[0]) for site in sites]
    assert launched[3:6] == [(site, site.tiles()[1]) for site in sites]


def test_compiling_ends_with_its_time() -> None:
    every = {PLAIN.compile_key(tile) for tile in PLAIN.tiles()}
    assert conv_timing.compile_all([PLAIN], CPU, -1.0) < every


FP32 = dataclasses.replace(PLAIN, input_shape=(1, 32, 4, 4), dtype=torch.float32)
TILES = FP32.tiles()[:3]
FAST, SLOW, OTHER = map(str, TILES)


class _Gpu:
    """A GPU on which every way to compute a site takes the seconds that a table says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float]) -> None:
        self.seconds, self.interleaved = seconds, list[str]()
        self.results: Callable[[str, Tensor], Tensor] = lambda tile, right: right
        monkeypatch.setattr(conv_timing, "launch", self.launch)
        monkeypatch.setattr(conv_timing, "capture_calls", self.capture)
        monkeypatch.setattr(conv_timing, "device_time", lambda replay, device, sample_s: replay)
        monkeypatch.setattr(conv_timing, "interleave", self.interleave)

    def launch(self, site: Site, operands: Operands, tile: Tile) -> Tensor:
        right = reference(*operands, site.geometry, site.groups, site.act1, site.act2)
        return self.results(str(tile), right)

    def capture(self, body: Any, warm_ups: int) -> tuple[SimpleNamespace]:
        assert warm_ups == 0  # it has been called already
        call = body.args[0]
        name = str(call.args[2]) if len(call.args) == 3 else conv_timing.PLAIN
        return (SimpleNamespace(replay=lambda: conv_timing.AT_ONCE * self.seconds[name]),)

    def interleave(self, samplers: Mapping[str, Callable[[], float]], **_: object) -> dict[str, Measurement]:
        self.interleaved = list(samplers)
        return {name: Measurement((sampler(),) * 4) for name, sampler in samplers.items()}


def fastest(site: Site = FP32) -> conv_timing.Timed:
    return conv_timing.fastest(site, TILES, CPU, Settings())


def test_the_time_of_one_call_is_told_for_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {conv_timing.PLAIN: 1.1, FAST: 1.0, SLOW: 1.15, OTHER: 1.05}
    _Gpu(monkeypatch, seconds)
    found = fastest()
    assert found.seconds == pytest.approx(seconds)
    assert found.refused == {}


def test_what_a_first_sample_shows_to_be_far_behind_is_not_sampled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = _Gpu(monkeypatch, {conv_timing.PLAIN: 9.0, FAST: 1.0, SLOW: 3.0, OTHER: 1.1})
    assert set(fastest().seconds) == {conv_timing.PLAIN, FAST, OTHER}
    assert gpu.interleaved == [conv_timing.PLAIN, FAST, OTHER]


def test_the_best_tile_is_sampled_however_far_it_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    _Gpu(monkeypatch, {conv_timing.PLAIN: 1.0, FAST: 8.0, SLOW: 9.0, OTHER: 8.5})
    assert set(fastest().seconds) == {conv_timing.PLAIN, FAST}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_depthwise_convolutions_are_compared_with_nothing_but_tiles(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    site = dataclasses.replace(DEPTHWISE, dtype=dtype, act1="relu", bias=True, add=True)
    tiles = site.tiles()[:2]
    gpu = _Gpu(monkeypatch, {str(tiles[0]): 2.0, str(tiles[1]): 1.0})
    found = conv_timing.fastest(site, tiles, CPU, Settings())
    assert found.seconds.keys() == {str(tiles[1])}
    assert found.refused == {}
    gpu.results = lambda tile, right: right * 1.1
    found = conv_timing.fastest(site, tiles, CPU, Settings())
    assert found.seconds == {}
    assert found.refused.keys() == {*map(str, tiles)}


@pytest.mark.parametrize("loses", [True, False])
def test_what_loses_infinities_is_nothing_to_compare_with(
    loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cuDNN's kernels for three channels do with the channel innermost."""

    def in_any_layout(x: Tensor, *others: Any) -> Tensor:
        result = reference(x, *others)
        return result.clamp(min=-1e4) if loses and not x.is_contiguous() else result

    monkeypatch.setattr(conv_timing, "reference", in_any_layout)
    gpu = _Gpu(monkeypatch, {conv_timing.PLAIN: 0.5, FAST: 1.0, SLOW: 1.15, OTHER: 1.1})
    found = fastest()
    assert (conv_timing.PLAIN in found.seconds) == (conv_timing.PLAIN in gpu.interleaved) == (not loses)
    assert found.refused == ({conv_timing.PLAIN: "it loses infinities"} if loses else {})
    assert found.seconds[FAST] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("site", "factor", "is_refused"),
    [
        (FP32, 1 + 1e-3, True),
        (FP32, 1 + 1e-6, False),
        (dataclasses.replace(FP32, tf32=True), 1 + 1e-3, False),
        (dataclasses.replace(FP32, tf32=True), 1.1, True),
        (FP32, float("nan"), True),
    ],
)
def test_a_tile_that_computes_something_else_is_refused_with_its_error(
    site: Site, factor: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = _Gpu(monkeypatch, {conv_timing.PLAIN: 1.0, FAST: 0.5, SLOW: 1.0, OTHER: 1.0})
    gpu.results = lambda tile, right: right * factor if tile == FAST else right
    found = fastest(site)
    assert (FAST in found.refused) is is_refused
    assert (FAST in found.seconds) is not is_refused
    if is_refused:
        assert found.refused[FAST].startswith("its error is ")


def test_a_tile_for_which_there_is_no_room_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = _Gpu(monkeypatch, {conv_timing.PLAIN: 1.0, FAST: 1.0, SLOW: 1.0, OTHER: 1.0})

    def no_room(tile: str, right: Tensor) -> Tensor:
        if tile == FAST:
            raise RuntimeError("out of resource: shared memory\nand more")
        return right

    gpu.results = no_room
    found = fastest()
    assert found.refused == {FAST: "RuntimeError: out of resource: shared memory"}
    assert set(found.seconds) == {conv_timing.PLAIN, SLOW, OTHER}


def test_a_site_that_cannot_be_captured_as_it_is_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _Gpu(monkeypatch, {})

    def fail(body: object, warm_ups: int) -> None:
        raise PassError("the CUDA graph could not be captured: no")

    monkeypatch.setattr(conv_timing, "capture_calls", fail)
    with pytest.raises(PassError, match="could not be captured"):
        fastest()


@pytest.mark.parametrize("site", [CONV_RELU, CONV_ADD_RELU])
def test_cudnns_own_form_is_tried_where_there_is_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    _Gpu(monkeypatch, {conv_timing.PLAIN: 1.0, FAST: 1.0, SLOW: 1.0, OTHER: 1.0})
    asked: list[str] = []

    def asked_for(name: str) -> Callable[..., Tensor]:
        def fail(*_: object) -> Tensor:
            asked.append(name)
            raise RuntimeError("no cuDNN here")

        return fail

    for name in ("cudnn_convolution_relu", "cudnn_convolution_add_relu"):
        monkeypatch.setattr(torch, name, asked_for(name))
    small = dataclasses.replace(site, input_shape=FP32.input_shape, dtype=torch.float32)
    assert fastest(small).refused == {conv_timing.BY_CUDNN: "RuntimeError: no cuDNN here"}
    assert asked == ["cudnn_convolution_add_relu" if site.add else "cudnn_convolution_relu"]


@pytest.mark.parametrize(
    "site",
    [PLAIN, dataclasses.replace(PLAIN, act1="silu"), LINEAR, EXCITED, dataclasses.replace(PLAIN, add=True)],
)
def test_cudnn_has_no_form_of_anything_else(site: Site) -> None:
    assert list(conv_timing._other_ways(site)) == [conv_timing.PLAIN]


@pytest.mark.gpu
@pytest.mark.parametrize("site", [CONV_RELU, CONV_ADD_RELU, EXCITED, LINEAR, DEPTHWISE])
def test_on_a_gpu_tiles_are_timed_beside_what_is_there(site: Site) -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    state = torch.cuda.get_rng_state()
    conv_timing.compile_all([site], cuda, 60.0)
    times = conv_timing.fastest(site, site.tiles(), cuda, Settings(), seconds=0.02).seconds
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert (conv_timing.PLAIN in times) == (not site.is_depthwise)
    assert (conv_timing.BY_CUDNN in times) == (site in (CONV_RELU, CONV_ADD_RELU))
    assert set(times) & {str(tile) for tile in site.tiles()}
    assert all(0 < seconds < 1 for seconds in times.values())
