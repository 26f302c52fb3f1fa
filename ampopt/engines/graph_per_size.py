"""A program for a range of sizes with a CUDA graph for each size that comes back."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from ampopt.engines.cuda_graphs import CapturedGraph, Outputs
from ampopt.errors import PassError, first_line
from ampopt.ir.program import Program

logger = logging.getLogger("ampopt")

MOST_GRAPHS = 8
"""Number of sizes that get a graph, each of which keeps the memory of its run."""

CALLS = 3
"""The call of a size that captures its graph, which takes as long as tens of calls; a size may not return."""

MOST_COUNTED = 1000
"""Number of sizes whose calls are counted; after that the counts begin anew."""


class GraphPerSize:
    """Runs the program for any of its sizes; from the third call of one on by a graph captured for it.

    Sizes that come when `MOST_GRAPHS` are captured, and one whose capture fails, run without; the log says
    why. Safe for several threads, which wait while one of them captures.
    """

    def __init__(self, program: Program, *, outputs: Outputs = "copy") -> None:
        self._program, self._outputs, self._lock = program, outputs, threading.Lock()
        self._captured: dict[tuple[torch.Size, ...], Callable[..., tuple[Tensor, ...]]] = {}
        self._calls: Counter[tuple[torch.Size, ...]] = Counter()

    @property
    def by_operators(self) -> Callable[..., tuple[Tensor, ...]]:
        """The program without a graph: its operators are called one by one."""
        return self._program.run

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Flat tensors in, flat tensors out."""
        sizes = tuple([tensor.shape for tensor in tensors])
        run = self._captured.get(sizes) or self._counted(sizes, tensors)
        return run(*tensors)

    def _counted(
        self, sizes: tuple[torch.Size, ...], tensors: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """What answers this call, after it has been counted."""
        with self._lock:
            if sizes in self._captured:
                return self._captured[sizes]
            if len(self._calls) >= MOST_COUNTED:
                self._calls.clear()
            self._calls[sizes] += 1
            if self._calls[sizes] < CALLS or len(self._captured) >= MOST_GRAPHS:
                return self._program.run
            self._captured[sizes] = self._captured_for(tensors)
            return self._captured[sizes]

    def _captured_for(self, tensors: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
        """A graph for these sizes, whose buffers are not of an inference mode that the call is made in."""
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                return CapturedGraph(self._program.replace(examples=tensors), outputs=self._outputs)
        except (PassError, RuntimeError) as error:  # no memory, for example
            shown = [list(tensor.shape) for tensor in tensors]
            logger.warning("ampopt: sizes %s run without a CUDA graph: %s", shown, first_line(error))
            return self._program.run
