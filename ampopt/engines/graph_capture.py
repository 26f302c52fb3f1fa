"""Captures CUDA graphs of calls, and selects the fastest of several instances of a graph."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ampopt.engines.graph_pointers import ReadyGraph
from ampopt.errors import PassError, first_line
from ampopt.ir.program import Program
from ampopt.measure.clocks import device_time
from ampopt.measure.sampling import interleave
from ampopt.system import flags
from ampopt.system.garbage import collected_later
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")

Result = TypeVar("Result")

WARM_UPS = 3
"""Number of runs before the capture: they create library handles and workspaces, and search algorithms."""

INSTANCES = 6
"""Number of instances of a captured graph that are timed.

An H200 takes up to 4 % longer for one than for another, and always as long for the same one: it depends on
where the driver puts its parameters in memory.
"""

INSTANCES_S, LONG_GRAPH_S = 0.05, 5e-3
"""Time in seconds for timing them, and the graph's own time from which on timing is not worth it."""

REFUSALS = (AttributeError, RuntimeError)
"""Errors for missing bindings, a missing driver or function, or a function that fails."""

_search_thread = ThreadPoolExecutor(1, thread_name_prefix="ampopt-cudnn-search")
_plain_thread = ThreadPoolExecutor(1, thread_name_prefix="ampopt-cudnn-plain")
"""Where programs that search cuDNN's algorithms are captured, and others; see `as_captured`."""


def capture_calls(
    body: Callable[[], tuple[Tensor, ...]], warm_ups: int = WARM_UPS, *, keep_graph: bool = False
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A CUDA graph of one call of `body` on the current device, and the static tensors that it returns.

    `warm_ups` calls run before it, on a side stream; 0 if `body` has been called already. The caller keeps
    all tensors alive that `body` reads. `keep_graph`: its nodes can be read afterwards. No garbage is
    collected meanwhile: an earlier graph in it cannot be destroyed during a capture, and breaks that. Raises
    PassError if the capture fails.
    """
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                body()
        current.wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
        with _own_workspaces(), torch.cuda.graph(graph, capture_error_mode="thread_local"), collected_later():
            outputs = body()
        if keep_graph:
            graph.instantiate()
    except Exception as error:
        torch.cuda.set_stream(current)  # PyTorch leaves its own
        _let_random_numbers_be_drawn()
        raise PassError(f"the CUDA graph could not be captured: {first_line(error)}") from error
    return graph, outputs


def _let_random_numbers_be_drawn() -> None:
    """End what PyTorch takes for a capture that goes on: one that failed, until another has ended.

    Until then the user's own `torch.randn(..., device="cuda")` raises "Offset increment outside graph capture
    encountered unexpectedly", whatever the generator is given.
    """
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda")
    except Exception as error:
        check_interrupted(error)
        logger.warning("ampopt: after a failed capture nothing can be captured: %s", first_line(error))


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let cuBLAS's workspaces in a capture lie in the graph's own memory, and be used by no other graph.

    PyTorch keeps one for each stream, and all captures are on the same stream: a graph would use one in the
    memory of an earlier graph, and an illegal address once that is gone (pytorch/pytorch#193402), or once
    something clears them, as `torch.compile`'s own graphs do. What is cleared stays in its graph's memory. As
    with those, a graph of the user's own loses a workspace that its stream had before the capture.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def as_captured(program: Program, work: Callable[[], Result]) -> Result:
    """Work on a program in the thread that captures it: where it gets the same algorithms of cuDNN.

    PyTorch caches cuDNN's plans per thread, and a plan chosen by cuDNN's heuristic stays in the cache
    whatever the search flag says. In a thread that only searches, every plan is a searched one; and in one
    that never does none is, which programs get where this thread has run one that searches, in the same
    dtype: of small convolutions a search finds slower ones (ShuffleNet-V2, `h200/searched_plans.json`).
    """
    if program.settings.search_algorithms:
        return flags.work_elsewhere(_search_thread, work)
    return flags.work_elsewhere(_plain_thread, work) if may_have_other_plans(program) else work()


def may_have_other_plans(program: Program) -> bool:
    """Whether a program may be captured with other algorithms of cuDNN than it runs with in this thread."""
    return program.settings.search_algorithms or program.lane.dtype in flags.searched.dtypes


def capture_program(
    program: Program, body: Callable[[], tuple[Tensor, ...]], warm_ups: int = WARM_UPS
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """`capture_calls` with the program's settings, in the thread for it, see `as_captured`."""
    stream = torch.cuda.current_stream(program.device)

    def work() -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        with torch.cuda.stream(stream), program.scope():
            return capture_calls(body, warm_ups, keep_graph=True)

    return as_captured(program, work)


def by_speed(instances: Sequence[ReadyGraph], device: torch.device) -> list[ReadyGraph]:
    """Instances of one graph, the fastest first; each of them is launched."""
    stream = torch.cuda.current_stream(device).cuda_stream
    samplers = {
        str(place): device_time(functools.partial(ready.launch, stream), device)
        for place, ready in enumerate(instances)
    }
    if samplers["0"]() > LONG_GRAPH_S:
        return list(instances)
    timed = interleave(samplers, seconds=INSTANCES_S, least=3)
    return [instances[int(place)] for place in sorted(timed, key=lambda place: timed[place].median)]


class ReplayedProgram:
    """A full run of a program in a CUDA graph, including conversions at its border, for the device clock.

    It is the fastest of a few instances, so that the memory addresses of two programs do not affect their
    comparison.
    """

    def __init__(self, program: Program) -> None:
        """Capture a run on the program's example inputs. Raises PassError if that fails."""
        self._inputs = [example.clone() for example in program.examples]  # the graph reads these
        self._graph, self._outputs = capture_program(program, lambda: program.run(*self._inputs))
        self._index = program.device.index or 0
        self._ready: ReadyGraph | None = None
        try:
            instances = [ReadyGraph(self._graph) for _ in range(INSTANCES)]
            self._ready = by_speed(instances, program.device)[0]
        except REFUSALS as error:
            logger.info("ampopt: the first instance of a CUDA graph is timed: %s", first_line(error))

    def replay(self) -> None:
        """Run the captured kernels."""
        if self._ready is not None:
            self._ready.launch(torch._C._cuda_getCurrentRawStream(self._index))
        else:
            self._graph.replay()
