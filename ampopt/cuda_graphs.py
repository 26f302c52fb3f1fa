"""One program captured as a CUDA graph: static inputs, a replay, outputs that the caller owns."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ampopt.errors import PassError
from ampopt.program import Border, Program

WARM_UPS = 3
"""Runs before the capture: library handles, workspaces and algorithm searches must exist by then."""


class CapturedGraph:
    """A program captured for the shapes of its example inputs.

    A call copies the inputs into static buffers (casting and changing layout on the way), replays, and
    copies the outputs out (casting back on the way). With `static=True` the outputs are static buffers
    that the next call overwrites. Safe from several threads and streams: one call at a time, and a call
    from another stream waits for the work of the one before.
    """

    def __init__(self, program: Program, inputs: Sequence[Tensor] | None = None, *, static: bool = False):
        """Warm up on a side stream, then capture. Raises PassError where the capture fails."""
        self._program, self._static, self._lock = program, static, threading.Lock()
        examples = program.examples if inputs is None else tuple(inputs)
        with torch.cuda.device(program.device):
            self._stream: torch.cuda.Stream = torch.cuda.current_stream()
            self._inputs = [
                border.convert(tensor.to(program.device)).clone()
                for border, tensor in zip(program.entry, examples, strict=True)
            ]
            try:
                self._capture()
            except Exception as error:
                reason = str(error).strip().splitlines()[0]
                raise PassError(f"the CUDA graph could not be captured: {reason}") from error
        self._exits = list(zip(program.exit, self._outputs, strict=True))

    def _capture(self) -> None:
        program, side = self._program, torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), program.settings.scope(program.device):
            for _ in range(WARM_UPS):
                self._body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with (
            program.settings.scope(program.device),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self._outputs = self._body()

    def _body(self) -> tuple[Tensor, ...]:
        program = self._program
        outputs = program.function(*self._inputs)
        if self._static:
            outputs = [b.convert(t) for b, t in zip(program.exit, outputs, strict=True)]
        return tuple(outputs)

    def replay(self) -> None:
        """Run the captured kernels on whatever the static inputs hold."""
        self._graph.replay()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Flat tensors in, flat tensors out."""
        with self._lock:
            self._follow_stream()
            for static, tensor in zip(self._inputs, tensors, strict=True):
                static.copy_(tensor.detach() if tensor.requires_grad else tensor)
            self._graph.replay()
            if self._static:
                return self._outputs
            return tuple([_owned(border, output) for border, output in self._exits])

    def _follow_stream(self) -> None:
        device = self._program.device
        if torch._C._cuda_getCurrentRawStream(device.index or 0) != self._stream.cuda_stream:
            self._stream.synchronize()
            self._stream = torch.cuda.current_stream(device)


def _owned(border: Border, output: Tensor) -> Tensor:
    if output.dtype is border.dtype and output.is_contiguous():
        return output.clone()
    return output.to(dtype=border.dtype, memory_format=border.memory_format, copy=True)
