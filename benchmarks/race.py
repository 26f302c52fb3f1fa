"""One race: contestants prepared in processes of their own, then timed in turn in both regimes."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ampopt.measure.headline import load_now
from ampopt.system.environment import environment
from benchmarks import engine_process, race_process
from benchmarks.contestants import Contestant
from benchmarks.race_process import error_of, write_parts
from benchmarks.race_protocol import Racer, racing_environment
from benchmarks.regimes import ROUNDS, in_turn, summary
from benchmarks.results_files import commit

BESIDE = 3
"""Contestants that are prepared at a time on a GPU, of those that time nothing meanwhile."""

PAUSE_S = 0.1
"""Before a block on a CPU: the threads of the one before may spin for 50 ms."""

Row = dict[str, Any]


def race(
    network: str,
    entered: Sequence[Contestant],
    device: torch.device,
    *,
    io: str = "fp32",
    threads: int | None = None,
    seconds: float = 0.0,
    rounds: int = ROUNDS,
) -> Row:
    """Run one network in one lane: for every contestant its facts and times, or why it has none."""
    now, load = commit(), load_now()
    with tempfile.TemporaryDirectory(prefix="ampopt-race-") as folder, contextlib.ExitStack() as stack:
        course = _Course(network, entered, device, io, threads, Path(folder), stack)
        course.prepare()
        course.time(seconds, rounds)
        after = load_now()
    return {
        "network": network,
        "lane": entered[0].lane,
        "io": io,
        "threads": threads,
        "environment": environment(device),
        "load": [None if each is None else each.average for each in (load, after)],
        "commit": now,
        "contestants": course.rows,
    }


class _Course:
    """The processes of a race and what is known of each."""

    def __init__(
        self,
        network: str,
        entered: Sequence[Contestant],
        device: torch.device,
        io: str,
        threads: int | None,
        folder: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        self.rows: dict[str, Row] = {each.name: {"lane": each.lane} for each in entered}
        self._network, self._entered, self._device = network, entered, device
        self._io, self._threads, self._folder, self._stack = io, threads, folder, stack
        self._racers: dict[str, Racer] = {}
        self._envs: dict[str, dict[str, str]] = {}
        self._begun = time.perf_counter()

    def prepare(self) -> None:
        """Make everybody's ways, those who time nothing side by side; then choose, one after another."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:  # they load their libraries side by side
            for each in self._entered:
                self._racers[each.name] = self._racer(each)
        write_parts(
            self._network, self._device, self._folder, as_onnx=any(each.engine for each in self._entered)
        )
        self._tell("reference computed")
        with ThreadPoolExecutor(BESIDE if on_gpu else 1) as pool:
            list(pool.map(self._make, (each for each in self._entered if not each.tunes)))
        for each in self._entered:
            if each.tunes:
                self._make(each)
        self._tell("all made")
        for each in self._running():
            self._ask(each.name, "choose")
            self._judge(each)
            self._print(each.name)
        self._tell("all chosen")
        with ThreadPoolExecutor(BESIDE if on_gpu else 1) as pool:
            list(pool.map(self._renew, self._running()))
        for each in self._running():
            self._ask(each.name, "settle")
        self._tell("all warmed up")

    def time(self, seconds: float, rounds: int) -> None:
        """Sample everybody who is there in turn, in both regimes."""
        names = [each.name for each in self._running()]
        blocks: dict[str, Callable[[str], Any]] = {
            name: functools.partial(self._racers[name].ask, "block") for name in names
        }
        pause_s = PAUSE_S if self._device.type == "cpu" else 0.0
        timed = in_turn(blocks, seconds=seconds, rounds=rounds, pause_s=pause_s) if blocks else {}
        for name, regimes in timed.items():
            self.rows[name] |= {regime: summary(found) for regime, found in regimes.items()}
        self._tell("all timed")
        if self._device.type == "cuda":
            for name in names:
                self.rows[name]["bytes"] = freed(self._racers[name], self._device)

    def _running(self) -> list[Contestant]:
        return [each for each in self._entered if "error" not in self.rows[each.name]]

    def _racer(self, each: Contestant) -> Racer:
        """A process of a contestant; a second one finds what the first left in their caches."""
        if each.engine is not None:
            count = self._threads or len(os.sched_getaffinity(0))
            command = engine_process.command(each.engine, self._folder, count)
        else:
            command = race_process.command(each.name, self._device, self._io, self._folder)
        if each.name not in self._envs:
            self._envs[each.name] = racing_environment(each.name, self._folder, self._threads)
        racer = Racer(command, self._envs[each.name])
        self._stack.callback(racer.end)
        return racer

    def _make(self, each: Contestant) -> None:
        if each.name not in self._racers:
            try:
                self._racers[each.name] = self._racer(each)
            except RuntimeError as failure:
                self.rows[each.name]["error"] = str(failure)
        self._ask(each.name, "make")
        if "unusable" in self.rows[each.name]:
            self._make_fewer(each)
        if "error" in self.rows[each.name]:
            self._print(each.name)

    def _make_fewer(self, each: Contestant) -> None:
        """Make the ways before the one that took the device with it, in a new process."""
        row = self.rows[each.name]
        self._racers[each.name].end()
        if count := row.pop("unusable"):
            self._racers[each.name] = self._racer(each)
            self._ask(each.name, "make", str(count))
        else:
            row["error"] = row.pop("left_out")

    def _renew(self, each: Contestant) -> None:
        """Make the way that won again in a new process, where those that lost take no memory.

        If that fails, the first process goes on.
        """
        row = self.rows[each.name]
        if not row.get("tried"):
            return
        second = self._racer(each)
        try:
            second.ask("make", "", row["won"])
            again = second.ask("choose")
        except RuntimeError as failure:
            row["not_renewed"] = str(failure)
            second.end()
            return
        self._racers[each.name].end()
        self._racers[each.name] = second
        row |= {key: again[key] for key in ("relative_error", "bytes") if key in again}

    def _ask(self, name: str, what: str, *arguments: str) -> None:
        if "error" in self.rows[name]:
            return
        try:
            self.rows[name] |= self._racers[name].ask(what, *arguments)
        except RuntimeError as failure:
            self.rows[name]["error"] = str(failure)
            self._racers[name].end()

    def _judge(self, each: Contestant) -> None:
        """The error of an engine without PyTorch, by the outputs that it wrote."""
        row = self.rows[each.name]
        if each.engine is None or "error" in row:
            return
        with np.load(self._folder / f"{each.engine}.npz") as stored:
            outputs = [torch.from_numpy(array) for array in stored.values()]
        reference = torch.load(self._folder / "reference.pt")
        try:
            row["relative_error"] = error_of(outputs, reference)
        except ValueError as failure:
            row["error"] = f"its outputs are not the network's: {failure}"

    def _print(self, name: str) -> None:
        row = self.rows[name]
        way = f" ({row['way']})" if row.get("way") else ""
        error = row.get("relative_error")
        exact = "has NaN or infinities" if error is None else f"error {error:.1e}"
        said = row.get("error") or f"made in {row['prepare_s']:.1f} s, {exact}{way}"
        print(f"{self._network}: {name}: {said}", flush=True)

    def _tell(self, what: str) -> None:
        print(f"{self._network}: {what} after {time.perf_counter() - self._begun:.0f} s", flush=True)


def freed(racer: Racer, device: torch.device) -> int:
    """End a contestant; the bytes of GPU memory that come back, those of its CUDA context among them."""
    before = torch.cuda.mem_get_info(device)[0]
    racer.end()
    return torch.cuda.mem_get_info(device)[0] - before
