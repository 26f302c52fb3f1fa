"""Several races at once, one on each GPU, each with its share of the processor's cores."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.results_files import Row

Race = tuple[str, str, str]
"""A network, a lane, and what goes in and comes out."""

MOST_AT_ONCE = 2
"""Four races at once starve the host."""


def longest_first(races: Iterable[Race], known: Sequence[Row]) -> list[Race]:
    """The races in order of what preparing their contestants took before; unknown ones come first."""
    took = {
        (row["network"], row["lane"], row["io"]): sum(
            each.get("prepare_s", 0.0) for each in row["contestants"].values()
        )
        for row in known
    }
    return sorted(races, key=lambda race: -took.get(race, float("inf")))


def run_all(
    races: Sequence[Race], gpus: Sequence[int], options: Sequence[str], done: Callable[[Row], None]
) -> list[Race]:
    """Run every race in `python -m benchmarks.peers` with these options; `done` gets each one's row.

    It is called by one thread at a time, after what the race printed was printed. Returns the races that
    brought no row.
    """
    waiting: queue.SimpleQueue[Race] = queue.SimpleQueue()
    for race in races:
        waiting.put(race)
    failed: list[Race] = []
    lock = threading.Lock()

    def work(place: int) -> None:
        while True:
            try:
                race = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.perf_counter()
            row, printed = _run(race, gpus[place], _share(place, len(gpus)), options)
            with lock:
                print(printed, end="")
                print(f"{', '.join(race)}: {time.perf_counter() - start:.0f} s", flush=True)
                if row is None:
                    failed.append(race)
                else:
                    done(row)

    with ThreadPoolExecutor(len(gpus)) as pool:
        for worker in [pool.submit(work, place) for place in range(len(gpus))]:
            worker.result()
    return failed


def _share(place: int, count: int) -> list[int]:
    """The cores of one of so many races, next to each other; all of them where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // count
    return cores[place * each : (place + 1) * each] or cores


def _run(race: Race, gpu: int, cores: Sequence[int], options: Sequence[str]) -> tuple[Row | None, str]:
    network, lane, io = race
    command = [sys.executable, "-m", "benchmarks.peers", "--models", network, "--lanes", lane, "--io", io]
    command += [*options, "--cores", *map(str, cores)]
    with tempfile.TemporaryDirectory(prefix="ampopt-race-") as folder:
        found = subprocess.run(
            [*command, "--out", folder],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        files = list(Path(folder).glob("*/race.json"))
        rows = json.loads(files[0].read_text(encoding="utf-8")) if files and not found.returncode else [None]
        return rows[0], found.stdout
