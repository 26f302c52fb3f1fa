"""Runs one call on several streams: it forks from the caller's stream and joins it at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ampopt.engines.branches import MAIN


class Streams(Protocol):
    """The streams of one call, by number; `MAIN` is the caller's. Call order: fork, …, join."""

    def fork(self, count: int) -> None:
        """Use `count` streams; the others start after the work launched on the main one so far."""

    def launch_on(self, stream: int) -> None:
        """Launch the following operators on this stream."""

    def record(self) -> Any:
        """Record an event: the end of the work launched on the current stream so far."""

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event."""

    def join(self, held: Sequence[object], outputs: Sequence[Tensor]) -> None:
        """Return to the main stream, and make it wait for all streams.

        `held` is an argument only to keep its values alive until now. The caller owns `outputs` from now on.
        """


@dataclasses.dataclass(frozen=True)
class Branched:
    """A graph that `branches.branched` has rewritten, as a function of its inputs."""

    graph: fx.GraphModule
    open_streams: Callable[[], contextlib.AbstractContextManager[Streams]]

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Flat tensors in, flat tensors out, all on the caller's stream."""
        with self.open_streams() as streams:
            outputs: Sequence[Tensor] = self.graph(streams, *tensors)
        return outputs


class CudaStreams:
    """CUDA streams in addition to `main`, the current one; under capture, waits become graph edges.

    PyTorch gives a freed block to the next operator on the stream that it was allocated on, which is only
    correct if every use of the block comes before. A block that is used on its own stream alone is safe. For
    the others, the join makes every stream wait for the end of all, so that a later allocation on one of
    them, by this engine or another user of PyTorch's few streams, comes after the last use. Outputs are used
    after that, so the allocator also waits for the main stream (`record_stream`). A capture has its own
    memory, and its streams must end at the join, so neither is done there.
    """

    def __init__(self, main: torch.cuda.Stream) -> None:
        """Start with `main` only; `fork` adds the others."""
        self._streams = [main]
        self._current = main

    def fork(self, count: int) -> None:
        """See `Streams`."""
        main = self._streams[MAIN]
        self._streams = [main, *_own.beside(main, count - 1)]
        self._follow(main.record_event())

    def launch_on(self, stream: int) -> None:
        """See `Streams`."""
        self._current = self._streams[stream]
        torch.cuda.set_stream(self._current)

    def record(self) -> torch.cuda.Event:
        """See `Streams`."""
        event: torch.cuda.Event = self._current.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """See `Streams`."""
        self._current.wait_event(event)

    def join(self, held: Sequence[object], outputs: Sequence[Tensor]) -> None:
        """See `Streams`."""
        main, *others = self._streams
        for stream in others:
            main.wait_stream(stream)
        self.launch_on(MAIN)
        if torch.cuda.is_current_stream_capturing():
            return
        self._follow(main.record_event())
        for output in outputs:
            if output.is_cuda:
                output.record_stream(main)

    def _follow(self, event: torch.cuda.Event) -> None:
        for stream in self._streams[1:]:
            stream.wait_event(event)


class _OwnStreams(threading.local):
    """A thread's streams, by their device: while one thread captures, others must not use its streams."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = {}

    def beside(self, main: torch.cuda.Stream, count: int) -> list[torch.cuda.Stream]:
        """`count` streams of this thread, none of them `main`."""
        streams = self._streams.setdefault(main.device, [])
        while len(others := [stream for stream in streams if stream != main]) < count:
            streams.append(torch.cuda.Stream(main.device))
        return others[:count]


_own = _OwnStreams()


@contextlib.contextmanager
def cuda_streams(device: torch.device) -> Iterator[CudaStreams]:
    """The streams for one call, from a device's current stream, which is current again afterwards.

    If the call fails, the streams are still joined, because launched work continues.
    """
    with torch.cuda.device(device):
        main = torch.cuda.current_stream()
        streams = CudaStreams(main)
        try:
            yield streams
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one to report
                streams.join((), ())
            raise
        finally:
            torch.cuda.set_stream(main)
