"""One program captured as a CUDA graph: static inputs, a replay, outputs that the caller owns."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import shared_cache

from ampopt import flags
from ampopt.errors import PassError
from ampopt.program import Border, Program

WARM_UPS = 3
"""Runs before the capture: library handles, workspaces and algorithm searches must exist by then."""

_search_thread = ThreadPoolExecutor(1, thread_name_prefix="ampopt-cudnn-search")
"""Where programs that search cuDNN's algorithms are captured; see `_capture`."""


def capture_calls(
    body: Callable[[], tuple[Tensor, ...]], warm_ups: int = WARM_UPS
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A CUDA graph of one call of `body` on the current device, and the static tensors that it returns.

    `warm_ups` calls go before it, on a side stream; none where `body` has been called already. The caller
    keeps alive whatever tensors `body` reads. Raises PassError where the capture fails.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = body()
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise PassError(f"the CUDA graph could not be captured: {reason}") from error
    return graph, outputs


def _capture(
    program: Program, body: Callable[[], tuple[Tensor, ...]], warm_ups: int = WARM_UPS
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """`capture_calls` in the program's settings, and in a thread of its own where algorithms are searched.

    PyTorch caches cuDNN's plans thread by thread, and a plan that cuDNN's heuristic once chose stays there
    whatever the search flag says. In a thread that only ever searches, every plan is a searched one.
    """
    stream = torch.cuda.current_stream(program.device)

    def work() -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        with torch.cuda.stream(stream), program.settings.scope(program.device):
            return capture_calls(body, warm_ups)

    return flags.work_elsewhere(_search_thread, work) if program.settings.search_algorithms else work()


class ReplayedProgram:
    """A whole run of a program in a CUDA graph, conversions at its border included, for the device clock."""

    def __init__(self, program: Program) -> None:
        """Capture a run on the program's example inputs. Raises PassError where that fails."""
        self._inputs = [example.clone() for example in program.examples]  # the graph reads these
        self._graph, self._outputs = _capture(program, lambda: program.run(*self._inputs))

    def replay(self) -> None:
        """Run the captured kernels."""
        self._graph.replay()


Outputs = Literal["copy", "lent", "static"]
"""Who owns the results of a captured program, see `CapturedGraph`."""

LENT = 2
"""Graphs whose outputs are lent: one result may still be in the caller's hands when the next is made."""

MOST_MEMORY = 0.02
"""The share of a GPU's memory that a captured run may take for there to be more than one of it."""


class CapturedGraph:
    """A program captured for the shapes of its example inputs.

    A call copies the inputs into static buffers (casting and changing layout on the way) and replays. With
    `outputs="copy"` it copies the outputs out (casting back on the way). With "static" they are buffers that
    the next call overwrites. With "lent" the program is captured several times, each in memory of its own:
    the outputs of a `_LentGraph` go to the caller as they are, and it is not replayed again before the
    caller has let go of them; where all are still held, or a run takes more than `MOST_MEMORY`, they are
    copied. PyTorch's `record_stream` does not reach lent results: work on another stream that reads one has
    to end before the last tensor that shares its memory is dropped. Safe from several threads and streams:
    one call at a time, and a call from another stream waits for the work of the one before.
    """

    def __init__(
        self, program: Program, inputs: Sequence[Tensor] | None = None, *, outputs: Outputs = "copy"
    ):
        """Warm up on a side stream, then capture. Raises PassError where the capture fails."""
        self._program, self._static, self._lock = program, outputs == "static", threading.Lock()
        examples = program.examples if inputs is None else tuple(inputs)
        with torch.cuda.device(program.device):
            self._stream: torch.cuda.Stream = torch.cuda.current_stream()
            self._inputs = [
                border.convert(tensor.to(program.device)).clone()
                for border, tensor in zip(program.entry, examples, strict=True)
            ]
            before = torch.cuda.memory_reserved()
            self._graph, self._outputs = _capture(program, self._body)
            taken, whole = torch.cuda.memory_reserved() - before, torch.cuda.mem_get_info()[1]
            count = LENT if outputs == "lent" and taken <= MOST_MEMORY * whole else 0
            lent = [_capture(program, self._whole, warm_ups=0) for _ in range(count)]
        self._lent = [_LentGraph(*captured) for captured in lent if _can_be_lent(captured[1], self._outputs)]
        self._replay = functools.partial(torch._C._CUDAGraph.replay, self._graph)
        self._copies_in = [static.copy_ for static in self._inputs]
        self._copies_out = [_copy_out(b, t) for b, t in zip(program.exit, self._outputs, strict=True)]
        self._index, self._raw_stream = program.device.index or 0, self._stream.cuda_stream

    def _body(self) -> tuple[Tensor, ...]:
        return self._whole() if self._static else tuple(self._program.function(*self._inputs))

    def _whole(self) -> tuple[Tensor, ...]:
        """The outputs as the caller is promised."""
        outputs = self._program.function(*self._inputs)
        return tuple([b.convert(t) for b, t in zip(self._program.exit, outputs, strict=True)])

    def replay(self) -> None:
        """Run the captured kernels on whatever the static inputs hold."""
        self._replay()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Flat tensors in, flat tensors out."""
        with self._lock:
            if torch._C._cuda_getCurrentRawStream(self._index) != self._raw_stream:
                self._follow_stream()
            for copy_in, tensor in zip(self._copies_in, tensors, strict=True):
                copy_in(tensor.detach() if tensor.requires_grad else tensor)
            for lent in self._lent:
                if lent.is_free():
                    return lent.run()
            self._replay()
            if self._static:
                return self._outputs
            return tuple([copy_out() for copy_out in self._copies_out])

    def _follow_stream(self) -> None:
        """Let the work of the call before, on another stream, end before this one touches the buffers."""
        self._stream.synchronize()
        self._stream = torch.cuda.current_stream(self._program.device)
        self._raw_stream = self._stream.cuda_stream


class _LentGraph:
    """A captured graph whose outputs the caller gets without a copy.

    Every tensor that shares an output's memory holds a reference to its storage, so the storage's own count
    tells whether anybody but this graph still has it; Python's count tells it of the storage object. What
    was sent to another process is in use for good.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self._outputs = outputs
        self._replay = functools.partial(torch._C._CUDAGraph.replay, graph)
        self._aliases = [output.detach for output in outputs]
        self._storages = [output.untyped_storage() for output in outputs]
        self._places = [storage._cdata for storage in self._storages]
        self._untouched = self._references()

    def _references(self) -> list[int]:
        counts = [*map(torch._C._storage_Use_Count, self._places), *map(sys.getrefcount, self._storages)]
        if shared_cache:
            sent = [reference.cdata for reference in list(shared_cache.values())]
            counts += [place for place in self._places if place in sent]
        return counts

    def is_free(self) -> bool:
        """Whether nothing that was given out shares memory with the outputs any more."""
        return self._references() == self._untouched

    def run(self) -> tuple[Tensor, ...]:
        """Replay and give the outputs out."""
        self._replay()
        return tuple([alias() for alias in self._aliases])


def _can_be_lent(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether each output has its memory to itself, and not in common with another capture's outputs.

    What all captures have in common was there before them, such as a weight.
    """
    storages = [output.untyped_storage() for output in outputs]
    whole = all(s.nbytes() == t.numel() * t.element_size() for s, t in zip(storages, outputs, strict=True))
    places = [storage.data_ptr() for storage in storages]
    apart = set(places).isdisjoint(other.untyped_storage().data_ptr() for other in others)
    return whole and apart and len(set(places)) == len(places)


def _copy_out(border: Border, output: Tensor) -> Callable[[], Tensor]:
    """What makes the caller's own tensor of a static output, by the quickest call that PyTorch has for it."""
    if output.is_contiguous() and output.dtype is border.dtype:
        return output.clone
    if output.is_contiguous() and border.dtype is torch.float32:
        return output.float
    return functools.partial(output.to, dtype=border.dtype, memory_format=border.memory_format, copy=True)
