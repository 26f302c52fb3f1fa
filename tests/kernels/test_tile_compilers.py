"""Tiles are compiled in processes that never touch a GPU; a GPU's process then finds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ampopt.kernels import tile_compilers
from ampopt.kernels.conv_tiles import Site
from ampopt.kernels.tile_compilers import TileCompilers, jobs_of

HOPPER = (9, 0)


def site(
    outs: int = 64,
    kernel: int = 1,
    *,
    groups: int = 1,
    rows: tuple[int, int] = (14, 14),
    act: str = "relu",
    scale: bool = False,
) -> Site:
    border = (1, 1, kernel // 2, kernel // 2, 1, 1)
    weight = (outs, 64 // groups, kernel, kernel)
    shape = (1, 64, *rows)
    return Site(shape, 64, weight, border, groups, torch.float16, True, False, scale, act, "", False)


SITES = [
    site(),
    site(128),
    site(kernel=3),
    site(groups=64, kernel=3, act="silu"),
    site(rows=(1, 1), act="sigmoid"),
    site(scale=True),
]


def test_every_kernel_is_compiled_once_and_the_best_estimate_of_every_site_first() -> None:
    jobs = list(jobs_of(SITES))
    keys = [key for key, _, _ in jobs]
    assert len(keys) == len(set(keys))
    assert {*keys} == {each.compile_key(tile) for each in SITES for tile in each.tiles()}
    firsts = [each.compile_key(each.tiles()[0]) for each in SITES]
    assert keys[: len(set(firsts))] == list(dict.fromkeys(firsts))


@pytest.mark.slow
def test_all_tiles_compile_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    script = (
        "import torch; from ampopt.kernels.tile_compilers import TileCompilers, jobs_of\n"
        "from tests.kernels.test_tile_compilers import HOPPER, SITES\n"
        "compilers = TileCompilers(2)\n"
        "assert compilers.compile_all(SITES, HOPPER) == {key for key, _, _ in jobs_of(SITES)}\n"
        "assert not torch.cuda.is_initialized()\n"
        "compilers.close()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # in this one CUDA may be initialized
    assert len(list(tmp_path.rglob("*.cubin"))) >= len(list(jobs_of(SITES)))


@pytest.mark.gpu
def test_what_was_compiled_without_a_gpu_is_what_a_gpu_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = "\n".join(
        (
            "import torch; from ampopt.kernels.tile_compilers import TileCompilers",
            "from tests.kernels.test_tile_compilers import SITES",
            "TileCompilers(4).compile_all(SITES, (major, minor))",
        )
    )
    major, minor = torch.cuda.get_device_capability()
    subprocess.run([sys.executable, "-c", f"major, minor = {major}, {minor}\n{before}"], check=True)
    compiled = {*tmp_path.rglob("*.cubin")}
    assert compiled
    after = (
        "import torch; from ampopt.kernels.conv_timing import compile_all\n"
        "from tests.kernels.test_tile_compilers import SITES\n"
        "compile_all(SITES, torch.device('cuda'), 60.0)\n"
    )
    subprocess.run([sys.executable, "-c", after], check=True)
    assert {*tmp_path.rglob("*.cubin")} == compiled


def test_a_tile_that_does_not_compile_is_not_among_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(tile_compilers, "compute", fail)
    compilers = TileCompilers(1)  # a fork of this process, in which all fail
    try:
        assert compilers.compile_all(SITES, HOPPER) == set()
    finally:
        compilers.close()


def test_processes_are_not_forked_after_cuda_was_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="after CUDA was initialized"):
        TileCompilers(1)
    tile_compilers.start()  # it does without
    assert tile_compilers.started() is None
