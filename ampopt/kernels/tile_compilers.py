"""Compiles tiles of `fused_conv` in several processes that never touch the GPU, into Triton's disk cache.

Threads of one process take turns at the half of the work that is Python's. Processes that are forked before
CUDA is initialized need none of its memory: a kernel is compiled for operands that have no storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent import futures

import torch

from ampopt.kernels.conv_tiles import Site
from ampopt.kernels.fused_conv import Tile, compute

PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 2))

Job = tuple[object, Site, Tile]
"""The `Site.compile_key` of a tile, and a site that it may compute."""

META = torch.device("meta")


def jobs_of(sites: Sequence[Site]) -> Iterator[Job]:
    """What has to be compiled for all tiles of some sites, each kernel once.

    The first tile of every site comes before the second of any: each has some if time is short.
    """
    tiles = [(site, site.tiles()) for site in sites]
    seen = set[object]()
    for rank in range(max((len(found) for _, found in tiles), default=0)):
        for site, found in tiles:
            if rank < len(found) and (key := site.compile_key(found[rank])) not in seen:
                seen.add(key)
                yield key, site, found[rank]


class TileCompilers:
    """The processes; they are forked when this is made, which has to be before CUDA is initialized."""

    def __init__(self, processes: int = PROCESSES) -> None:
        """Raises RuntimeError where CUDA is initialized already, ValueError where nothing can be forked."""
        if torch.cuda.is_initialized():
            raise RuntimeError("a process that was forked after CUDA was initialized cannot use Triton")
        self._pool = futures.ProcessPoolExecutor(processes, multiprocessing.get_context("fork"))
        futures.wait([self._pool.submit(os.getpid) for _ in range(processes)])

    def compile_all(self, sites: Sequence[Site], capability: tuple[int, int]) -> set[object]:
        """Compile the tiles of all sites for a compute capability; the keys of those that compiled."""
        jobs = list(jobs_of(sites))
        done = self._pool.map(_is_compiled, jobs, [capability] * len(jobs))
        return {key for (key, _, _), is_done in zip(jobs, done, strict=True) if is_done}

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)


_started: list[TileCompilers] = []


def start() -> None:
    """Fork the processes of this process, for `started`; nothing where that is not possible."""
    with contextlib.suppress(RuntimeError, ValueError, OSError):
        _started.append(TileCompilers())


def started() -> TileCompilers | None:
    """What `start` has started."""
    return _started[-1] if _started else None


def _is_compiled(job: Job, capability: tuple[int, int]) -> bool:
    """Compile one tile; whether that is possible. A failure is repeated, and told, where it is timed."""
    _, site, tile = job
    with contextlib.suppress(Exception):
        _for_gpus_of(capability)
        compute(*site.random_operands(META), site.geometry, site.groups, site.act1, site.act2, str(tile))
        return True
    return False


@dataclasses.dataclass(frozen=True)
class _Target:
    """Stands in for Triton's driver, which would initialize CUDA to find out what it compiles for."""

    capability: tuple[int, int]

    def get_current_target(self) -> object:
        """What Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """Kernels are kept by device."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Nothing is launched."""
        return 0


def _for_gpus_of(capability: tuple[int, int]) -> None:
    from triton.runtime import driver

    driver.set_active(_Target(capability))
