"""Captures CUDA graphs of calls, and selects the fastest of several instances of a graph."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ampopt.engines.graph_pointers import ReadyGraph
from ampopt.errors import PassError, first_line
from ampopt.ir.program import Program
from ampopt.measure.clocks import device_time
from ampopt.measure.sampling import interleave
from ampopt.system import flags

logger = logging.getLogger("ampopt")

WARM_UPS = 3
"""Runs before the capture: library handles, workspaces and algorithm searches must exist by then."""

INSTANCES = 6
"""Instances of a captured graph that are timed. An H200 takes up to 4 % longer for one than for another,
and always as long for the same one: where the driver puts its parameters in memory decides."""

INSTANCES_S, LONG_GRAPH_S = 0.05, 5e-3
"""Seconds in which they are timed, and a graph's own from which on it makes no difference worth the time."""

REFUSALS = (AttributeError, RuntimeError)
"""There are no bindings or no driver, one has not got a function, or one refuses."""

_search_thread = ThreadPoolExecutor(1, thread_name_prefix="ampopt-cudnn-search")
"""Where programs that search cuDNN's algorithms are captured; see `capture_program`."""


def capture_calls(
    body: Callable[[], tuple[Tensor, ...]], warm_ups: int = WARM_UPS, *, keep_graph: bool = False
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A CUDA graph of one call of `body` on the current device, and the static tensors that it returns.

    `warm_ups` calls go before it, on a side stream; none where `body` has been called already. The caller
    keeps alive whatever tensors `body` reads. `keep_graph`: its nodes can be read afterwards. Raises
    PassError where the capture fails.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = body()
        if keep_graph:
            graph.instantiate()
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise PassError(f"the CUDA graph could not be captured: {reason}") from error
    return graph, outputs


def capture_program(
    program: Program, body: Callable[[], tuple[Tensor, ...]], warm_ups: int = WARM_UPS
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """`capture_calls` in the program's settings, and in a thread of its own where algorithms are searched.

    PyTorch caches cuDNN's plans thread by thread, and a plan that cuDNN's heuristic once chose stays there
    whatever the search flag says. In a thread that only ever searches, every plan is a searched one.
    """
    stream = torch.cuda.current_stream(program.device)

    def work() -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        with torch.cuda.stream(stream), program.scope():
            return capture_calls(body, warm_ups, keep_graph=True)

    return flags.work_elsewhere(_search_thread, work) if program.settings.search_algorithms else work()


def by_speed(instances: Sequence[ReadyGraph], device: torch.device) -> list[ReadyGraph]:
    """Instances of one graph, the fastest first; all of them run."""
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
    """A whole run of a program in a CUDA graph, conversions at its border included, for the device clock.

    It is the fastest of a few instances, so that two programs are not compared by where theirs happen to be.
    """

    def __init__(self, program: Program) -> None:
        """Capture a run on the program's example inputs. Raises PassError where that fails."""
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
