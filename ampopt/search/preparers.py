"""Processes that compile kernels ahead of the pass that measures them, which finds them in caches on disk."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ampopt.ir.pickled import pickled
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass
from ampopt.kernels.conv_tiles import Site
from ampopt.kernels.conv_timing import compile_all
from ampopt.kernels.fused_conv import is_available
from ampopt.kernels.own_operators import register
from ampopt.system.children import start_child
from ampopt.system.interrupts import check_interrupted

LOADING_S = 10.0
"""Seconds after which loading the compiler is given up: the work itself does it, then."""


class Preparers:
    """Up to `count` processes beside the GPU of a device, each of which does a share of one pass's work."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device, self._count = device, count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._killed: list[subprocess.Popen[bytes]] = []
        self._working_on: Pass | None = None

    def start(self) -> None:
        """Start the processes: they load their libraries until there is work."""
        with contextlib.suppress(OSError):  # no memory or no process left: then nothing is prepared
            while len(self._processes) < self._count:
                self._processes.append(
                    start_child(__name__, str(self._device), cores=1, stdin=subprocess.PIPE)
                )

    def begin(self, step: Pass, program: Program) -> None:
        """Let them prepare a pass, if it has anything to prepare, and if they are free."""
        if self._working_on is not None or self._count == 0:
            return
        try:
            shares = step.preparations(program, self._count)
            if shares:
                self._give(step, shares)
        except Exception as error:  # the pass itself is going to tell
            check_interrupted(error)

    def _give(self, step: Pass, shares: Sequence[Callable[[], Any]]) -> None:
        self.start()
        self._working_on = step
        for process, share in zip(self._processes, shares, strict=False):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: nothing is prepared
                process.stdin.write(pickled(share))
                process.stdin.close()

    def end_for(self, step: Pass) -> Pass:
        """End the work for a pass that is about to be applied, and goes on from there; the pass to apply."""
        if self._working_on is None or self._working_on.name != step.name:
            return step
        self._kill()
        return step.prepared()

    def _kill(self) -> None:
        """Kill the processes, and all that they have started; with a GPU one takes half a second to end."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self._killed += self._processes
        self._processes, self._working_on = [], None

    def close(self) -> None:
        """Kill the processes, and all that they have started, and wait for their end."""
        self._kill()
        for process in self._killed:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self._killed = []


def _load_compiler(device: torch.device) -> None:
    """Compile something small, so that nothing is left to be loaded when the work comes."""
    if device.type == "cuda" and is_available():
        small = Site((1, 16, 4, 4), 16, (16, 16, 1, 1), (1, 1, 0, 0, 1, 1), 1, torch.float16, True, False,
                     False, "relu", "", False)  # fmt: skip
        compile_all([small], device, LOADING_S)


if __name__ == "__main__":
    gc.disable()
    register()
    _load_compiler(torch.device(sys.argv[1]))
    pickle.load(sys.stdin.buffer)()
