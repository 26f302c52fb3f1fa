"""fuse-conv-triton: which tiles are compiled, by other processes too, and measured, and which is taken."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import pytest
import torch

from ampopt.ir.transform import Declined, Result
from ampopt.kernels.conv_tiles import Site
from ampopt.kernels.conv_timing import Timed
from ampopt.kernels.fused_conv import Tile
from ampopt.passes import BakeAutocast, FuseConvTriton
from tests.helpers import FP16, apply_to_untouched, program_of
from tests.support.convolving import NHWC, convolving


@dataclasses.dataclass
class _Clock:
    """Stands in for measurements: each takes a second and finds `times`."""

    times: dict[str, float]
    now: float = 0.0
    ready: int | None = None
    compiling: float = 0.0
    measured: list[Site] = dataclasses.field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now

    def fastest(self, site: Site, tiles: Sequence[Tile], device: torch.device, settings: object) -> Timed:
        assert tiles == site.tiles()[: self.ready]
        self.measured.append(site)
        self.now += 1.0
        return Timed(self.times, {"dense:1": "OutOfResources: shared memory"})

    def compile_all(self, sites: Iterable[Site], device: torch.device, seconds: float) -> set[object]:
        assert seconds > 0
        self.now += self.compiling
        return {site.compile_key(tile) for site in sites for tile in site.tiles()[: self.ready]}


def _measured_by(clock: _Clock, monkeypatch: pytest.MonkeyPatch, step: FuseConvTriton) -> Result:
    monkeypatch.setattr(
        "ampopt.passes.fuse_conv_triton.time", SimpleNamespace(perf_counter=clock.perf_counter)
    )
    monkeypatch.setattr("ampopt.kernels.conv_timing.fastest", clock.fastest)
    monkeypatch.setattr("ampopt.kernels.conv_timing.compile_all", clock.compile_all)
    model = convolving(lambda m, x: m.s(m.a(m.a(x).relu()).relu()))
    return apply_to_untouched(step, program_of(model, torch.randn(2, 16, 8, 8), on_top_of=NHWC))


SLOW, FAST = "dense:16:32:32:1:2:4:ieee", "dense:32:32:32:1:4:4:ieee"


def test_the_fastest_tile_is_taken_and_equal_sites_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock({"as it is": 5e-6, "by cuDNN": 4e-6, SLOW: 3e-6, FAST: 2e-6})
    result = _measured_by(clock, monkeypatch, FuseConvTriton())
    assert len(clock.measured) == 2
    assert result.replay == FuseConvTriton(choices=tuple((f"conv2d{n}", FAST) for n in ("", "_1", "_2")))


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ({"as it is": 5e-6, "by cuDNN": 2e-6, FAST: 1.97e-6}, "as it is 2.0 µs, the best tile 2.0 µs"),
        ({"as it is": 5e-6, SLOW: 8e-6, FAST: 7e-6}, "as it is 5.0 µs, the best tile 7.0 µs"),
        ({"as it is": 5e-6}, "as it is 5.0 µs, the best tile fails: OutOfResources: shared memory"),
    ],
)
def test_what_gains_too_little_is_declined(
    times: dict[str, float], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = _measured_by(_Clock(times), monkeypatch, FuseConvTriton())
    assert result.rewrites == 0
    assert {declined.reason for declined in result.declined} == {reason}


def test_measuring_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock({"as it is": 5e-6, FAST: 2e-6})
    result = _measured_by(clock, monkeypatch, FuseConvTriton(seconds=0.5))
    assert [name for name, _ in result.replay.choices or ()] == ["conv2d", "conv2d_1"]  # type: ignore[union-attr]
    assert result.declined == (Declined("conv2d_2", "the time for measurements was spent"),)


def test_what_took_long_to_compile_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock({"as it is": 5e-6, FAST: 2e-6}, compiling=100.0)
    assert _measured_by(clock, monkeypatch, FuseConvTriton(seconds=6.0)).rewrites == 3
    clock = _Clock({"as it is": 5e-6, FAST: 2e-6}, compiling=100.0)
    result = _measured_by(clock, monkeypatch, FuseConvTriton(seconds=0.5))
    assert len(clock.measured) == 1
    assert result.declined == (Declined("conv2d_2", "the time for measurements was spent"),)


def test_tiles_that_were_not_compiled_in_time_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock({"as it is": 5e-6, FAST: 2e-6}, ready=1)
    assert _measured_by(clock, monkeypatch, FuseConvTriton()).rewrites == 3
    clock = _Clock({"as it is": 5e-6, FAST: 2e-6}, ready=0)
    result = _measured_by(clock, monkeypatch, FuseConvTriton())
    assert clock.measured == []
    assert {declined.reason for declined in result.declined} == {"the time for measurements was spent"}


def _sites_of(shares: Sequence[Callable[[], object]]) -> list[Site]:
    calls = [pickle.loads(pickle.dumps(share)) for share in shares]
    return [site for call in calls for site in call.args[0]]


def test_other_processes_can_compile_every_tile_that_would_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FuseConvTriton, "why_not", lambda *_: None)
    clock = _Clock({"as it is": 5e-6, FAST: 2e-6})
    _measured_by(clock, monkeypatch, FuseConvTriton())
    model = convolving(lambda m, x: m.s(m.a(m.a(x).relu()).relu()))
    program = program_of(model, torch.randn(2, 16, 8, 8), on_top_of=NHWC)
    for count in (1, 2, 3):
        shares = FuseConvTriton().preparations(program, count)
        assert len(shares) == min(count, 2)
        assert sorted(map(repr, _sites_of(shares))) == sorted(map(repr, clock.measured))
    assert FuseConvTriton(choices=()).preparations(program, 2) == ()


def test_after_that_it_compiles_for_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[float]()

    def compile_all(sites: Iterable[Site], device: torch.device, seconds: float) -> set[object]:
        given.append(seconds)
        return set()

    for step in (FuseConvTriton(), FuseConvTriton().prepared()):
        clock = _Clock({})
        clock.compile_all = compile_all  # type: ignore[method-assign]
        _measured_by(clock, monkeypatch, step)  # type: ignore[arg-type]
    assert given[1] < 0.6 * given[0]


@pytest.mark.gpu
def test_what_other_processes_compile_is_all_that_there_is() -> None:
    model = convolving(lambda m, x: m.s(m.a(m.a(x).relu()).relu())).cuda()
    program = program_of(
        model, torch.randn(2, 16, 8, 8, device="cuda"), lane=FP16, on_top_of=[BakeAutocast()]
    )
    shares = FuseConvTriton().preparations(program, 2)
    keys = {site.compile_key(tile) for site in _sites_of(shares) for tile in site.tiles()}
    assert set().union(*(share() for share in shares)) == keys  # type: ignore[arg-type]
