"""fuse-conv-triton at work: a network of every kind of chain, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Pass, Result
from ampopt.kernels.conv_chains import Chain, find_chains
from ampopt.kernels.fused_conv import Tile
from ampopt.passes import (
    AllowTf32,
    BakeAutocast,
    ChannelsLast,
    Compile,
    CudaGraph,
    FoldConvBn,
    FuseConvTriton,
)
from tests.helpers import (
    FP16,
    Model,
    apply_to_untouched,
    check_graph,
    error_of,
    program_of,
    targets_of,
    with_statistics,
)
from tests.support.interpreted import read_numbers_of_one_element


def _nets() -> dict[str, tuple[nn.Module, Tensor]]:
    """Small networks whose chains depend on each other."""

    def block(m: Any, x: Tensor) -> Tensor:
        x = F.hardswish(m.norm(m.stem(x)))
        x = (m.second(m.first(x).relu()) + x).relu()
        y = F.hardswish(m.deep(x))
        x = m.project(y * F.hardsigmoid(m.grow(m.shrink(y.mean((2, 3), keepdim=True)).relu()))) + x
        x = (m.down(x) + m.grouped(x)).relu()
        return F.gelu(m.head(x.mean((2, 3))))

    conv = functools.partial(nn.Conv2d, kernel_size=3, padding=1)
    net = Model(
        block,
        stem=conv(3, 16, stride=2),
        norm=nn.BatchNorm2d(16),
        first=conv(16, 16),
        second=conv(16, 16),
        deep=conv(16, 16, groups=16),
        shrink=nn.Conv2d(16, 8, 1),
        grow=nn.Conv2d(8, 16, 1),
        project=nn.Conv2d(16, 16, 1),
        down=nn.Conv2d(16, 24, 1, stride=2),
        grouped=conv(16, 24, stride=2, groups=4),
        head=nn.Linear(24, 10),
    )
    return {"all kinds": (with_statistics(net), torch.randn(2, 3, 12, 12))}


def _with_tiles(program: Program, tile: Callable[[Chain], str | None]) -> Result:
    chosen = [
        (chain.conv.name, tile(chain))
        for chain in find_chains(record_shapes(program), program.settings.tf32)[0]
    ]
    return FuseConvTriton(choices=tuple((name, text) for name, text in chosen if text)).apply(program)


def main() -> None:
    """Print the error of a fused network in Triton's interpreter, and how many rewrites it took."""
    read_numbers_of_one_element()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = _nets()["all kinds"]
    program = program_of(model, x, on_top_of=[FoldConvBn(), ChannelsLast()])
    result = _with_tiles(program, lambda chain: str(chain.site.tiles()[-1]))
    again = (result.replay or FuseConvTriton()).apply(result.program)
    error = error_of(result.program, model, [x])
    print(json.dumps({"rewrites": result.rewrites, "again": again.rewrites, "error": error}))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_fused_chains_that_read_each_other_are_right_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "tests.passes.test_fuse_conv_triton_at_work"]
    environment, root = {**os.environ, "TRITON_INTERPRET": "1"}, Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["rewrites"], found["again"]) == (10, 0)
    assert found["error"] < 1e-5


LANES = [
    pytest.param(FP32, [FoldConvBn(), ChannelsLast()], id="float32"),
    pytest.param(FP32, [FoldConvBn(), AllowTf32(), ChannelsLast()], id="tf32"),
    pytest.param(FP16, [BakeAutocast(), FoldConvBn(), ChannelsLast()], id="float16"),
]


def _limit(program: Program) -> float:
    half = program.lane.is_mixed
    return 2e-2 if half or program.settings.tf32 else 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize(("lane", "before"), LANES)
def test_on_a_gpu_what_is_measured_to_be_faster_is_right(lane: Lane, before: list[Pass]) -> None:
    model, x = _nets()["all kinds"]
    model, x = model.cuda(), x.cuda()
    program = program_of(model, x, lane=lane, on_top_of=before)
    result = apply_to_untouched(FuseConvTriton(), program)
    assert result.rewrites + len(result.declined) == 10
    check_graph(result.program)
    assert error_of(result.program, model, [x]) < _limit(program)
    if result.replay is not None:
        assert result.replay.apply(result.program).rewrites == 0
        assert targets_of(result.replay.apply(program).program) == targets_of(result.program)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [nn.Identity, nn.ReLU, nn.Hardswish])
def test_on_a_gpu_an_infinite_pixel_is_not_lost(activation: Callable[[], nn.Module]) -> None:
    """cuDNN's kernels for three channels with the channel innermost make numbers of negative infinity."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), activation()).cuda().eval()
    x = torch.randn(1, 3, 128, 128, device="cuda")
    x[0, 1, 64, 64] = torch.inf
    program = program_of(model, x, lane=FP16, on_top_of=[BakeAutocast()])
    fused = apply_to_untouched(FuseConvTriton(), program).program
    with torch.no_grad(), torch.autocast("cuda"):
        expected = model(x).isfinite()
    assert not expected.all()
    assert not (fused.run(x)[0].isfinite() & ~expected).any()


def _in_parts(tile: Tile) -> Tile:
    return dataclasses.replace(tile, parts=3) if tile.kind == "dense" else tile


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "depthwise", "vector", "parts"])
@pytest.mark.parametrize(("lane", "before"), LANES)
def test_on_a_gpu_every_kind_of_tile_is_right(lane: Lane, before: list[Pass], kind: str) -> None:
    model, x = _nets()["all kinds"]
    model, x = model.cuda(), x.cuda()
    program = program_of(model, x, lane=lane, on_top_of=before)

    def tile(chain: Chain) -> str | None:
        tiles = [t for t in chain.site.tiles() if t.kind == ("dense" if kind == "parts" else kind)]
        return str(_in_parts(tiles[0]) if kind == "parts" else tiles[0]) if tiles else None

    result = _with_tiles(program, tile)
    assert result.rewrites > 0
    assert error_of(result.program, model, [x]) < _limit(program)
    if kind in ("dense", "parts"):
        fused = _with_tiles(program, lambda chain: str(_in_parts(chain.site.tiles()[0]))).program
        for engine in (Compile(), CudaGraph()):
            changed = engine.apply(fused)
            assert changed.rewrites == 1
            assert error_of(changed.program, model, [x]) < _limit(program)


if __name__ == "__main__":
    main()
