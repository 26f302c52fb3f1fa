"""One program captured as a CUDA graph: it reads the caller's tensors and writes into fresh ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from ampopt import flags
from ampopt.errors import PassError, first_line
from ampopt.graph_pointers import GraphNodes, Pointer
from ampopt.numerics import relative_error
from ampopt.program import Program

logger = logging.getLogger("ampopt")

WARM_UPS = 3
"""Runs before the capture: library handles, workspaces and algorithm searches must exist by then."""

_search_thread = ThreadPoolExecutor(1, thread_name_prefix="ampopt-cudnn-search")
"""Where programs that search cuDNN's algorithms are captured; see `_capture`."""


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
            return capture_calls(body, warm_ups, keep_graph=True)

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


Outputs = Literal["copy", "static"]
"""Who owns the results of a captured program, see `CapturedGraph`."""

ALIGNED = 256
"""Bytes that divide the address of a tensor that is read in place; kernels were chosen for such ones."""

SAME = 1e-2
"""The relative error within which two runs of one graph are the same: some operators add in any order."""


class CapturedGraph:
    """A program captured for the shapes of its example inputs, conversions at its border included.

    A call reads the caller's tensors where they are. With `outputs="copy"` it writes into fresh tensors, with
    "static" into buffers that the next call overwrites. To that end the addresses in the graph's nodes are
    changed before it is launched (`graph_pointers`); whether the results are then the same is tried once,
    after the capture. Inputs that are laid out otherwise than the examples, or begin at an odd address, are
    copied into a buffer first. Where addresses cannot be changed, everything is copied in and out. Safe from
    several threads and streams: one call at a time, and a call from another stream waits for the work of the
    one before.
    """

    def __init__(self, program: Program, *, outputs: Outputs = "copy") -> None:
        """Warm up on a side stream, then capture. Raises PassError where the capture fails."""
        self._program, self._is_static, self._lock = program, outputs == "static", threading.Lock()
        with torch.cuda.device(program.device):
            self._stream: torch.cuda.Stream = torch.cuda.current_stream()
            self._inputs = [tensor.detach().to(program.device, copy=True) for tensor in program.examples]
            self._graph, self._outputs = _capture(program, self._body)
            self._sources, self._targets = self._pointers()
        self._strides = [tensor.stride() for tensor in self._inputs]
        self._index, self._raw_stream = program.device.index or 0, self._stream.cuda_stream

    def _body(self) -> tuple[Tensor, ...]:
        """The outputs as the caller is promised."""
        return self._program.run(*self._inputs)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Flat tensors in, flat tensors out."""
        with self._lock:
            if torch._C._cuda_getCurrentRawStream(self._index) != self._raw_stream:
                self._follow_stream()
            addresses = [
                tensor.data_ptr() if self._sources and _is_laid_out(tensor, strides) else _copied(tensor, to)
                for tensor, strides, to in zip(tensors, self._strides, self._inputs, strict=True)
            ]
            if self._is_static:
                return self._launch(addresses, self._outputs)
            if not self._targets:
                return tuple([output.clone() for output in self._launch(addresses, self._outputs)])
            return self._launch(addresses, tuple([torch.empty_like(output) for output in self._outputs]))

    def _launch(self, addresses: Sequence[int], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Launch on inputs at these addresses, writing into `outputs` where that can be chosen."""
        for source, address in zip(self._sources, addresses, strict=False):
            if address != source.address:
                source.move(address)
        for target, output in zip(self._targets, outputs, strict=False):
            if (address := output.data_ptr()) != target.address:
                target.move(address)
        torch._C._CUDAGraph.replay(self._graph)
        return outputs

    def _follow_stream(self) -> None:
        """Let the work of the call before, on another stream, end before this one touches the buffers."""
        self._stream.synchronize()
        self._stream = torch.cuda.current_stream(self._program.device)
        self._raw_stream = self._stream.cuda_stream

    def _pointers(self) -> tuple[list[Pointer], list[Pointer]]:
        """Where the graph's nodes hold the addresses of inputs and outputs; nothing where that is not sure.

        It is tried: the graph's own buffers are filled with NaN, and a launch on other memory has to give
        what it gave before, and to leave its inputs as they are.
        """
        examples, others = ([tensor.clone() for tensor in self._inputs] for _ in range(2))
        self._graph.replay()
        expected = [output.clone() for output in self._outputs]
        for tensor in self._inputs:
            _spoil(tensor)
        try:
            if not self._outputs_can_move(expected):
                self._capture_into_buffers()
            nodes = GraphNodes(self._graph)
            self._sources = [nodes.pointer(tensor) for tensor in self._inputs]
            self._targets = [] if self._is_static else [nodes.pointer(tensor) for tensor in self._outputs]
            fresh = tuple([_spoil(torch.empty_like(tensor)) for tensor in expected])
            self._launch([tensor.data_ptr() for tensor in others], fresh)
            found = self._outputs if self._is_static else fresh
            same = all(relative_error(a, b) <= SAME for a, b in zip(found, expected, strict=True))
            same &= all(relative_error(a, b) == 0.0 for a, b in zip(others, examples, strict=True))
            reason = "a launch on other memory gives something else"
        except (OSError, AttributeError, RuntimeError) as error:  # no driver's function, or one that refuses
            same, reason = False, first_line(error)
        for tensor, example in zip(self._inputs, examples, strict=True):
            tensor.copy_(example)
        if same:
            return self._sources, self._targets
        logger.info("ampopt: inputs and outputs of a CUDA graph are copied in every call: %s", reason)
        self._graph, self._outputs = _capture(self._program, self._body, warm_ups=0)
        return [], []

    def _outputs_can_move(self, expected: Sequence[Tensor]) -> bool:
        """Whether one node writes each output, into memory of its own that no other node touches.

        What is the same although the inputs hold NaN now may be no result of the graph at all, but a weight.
        Outputs that stay need only be apart from the inputs, which do not.
        """
        places = [tensor.untyped_storage().data_ptr() for tensor in (*self._outputs, *self._inputs)]
        if self._is_static or not self._outputs:
            return set(places[: len(self._outputs)]).isdisjoint(places[len(self._outputs) :])
        self._graph.replay()
        nodes = GraphNodes(self._graph)
        return len(set(places)) == len(places) and all(
            nodes.pointer(output).nodes == 1
            and output.is_contiguous()
            and output.untyped_storage().nbytes() == output.numel() * output.element_size()
            and not torch.equal(output, before)
            for output, before in zip(self._outputs, expected, strict=True)
        )

    def _capture_into_buffers(self) -> None:
        """Capture anew, with outputs written into memory that nothing else is written into."""
        buffers = tuple([torch.empty_like(output) for output in self._outputs])

        def body() -> tuple[Tensor, ...]:
            for buffer, output in zip(buffers, self._body(), strict=True):
                buffer.copy_(output)
            return buffers

        self._graph, self._outputs = _capture(self._program, body, warm_ups=0)


def _is_laid_out(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a kernel that was captured for these strides can read the tensor in its place."""
    return (
        tensor.__class__ in _PLAIN
        and tensor.stride() == strides
        and tensor.data_ptr() % ALIGNED == 0
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


_PLAIN = (Tensor, Parameter)
"""Other classes of tensors may keep their numbers elsewhere."""


def _copied(tensor: Tensor, buffer: Tensor) -> int:
    """Copy a tensor into a buffer; the buffer's address."""
    buffer.copy_(tensor.detach() if tensor.requires_grad else tensor)
    return buffer.data_ptr()


def _spoil(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN, or with 0 where its dtype has none, which is a valid index."""
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0)
