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
    """The streams of one call, by number; `MAIN` is its caller's. Called in the order fork, …, join."""

    def fork(self, count: int) -> None:
        """Take `count` streams; the others begin where the main one is now."""

    def launch_on(self, stream: int) -> None:
        """What follows is launched on this stream."""

    def record(self) -> Any:
        """An event: the end of what was launched on the current stream so far."""

    def wait(self, event: Any) -> None:
        """What follows on the current stream begins after an event."""

    def join(self, held: Sequence[object], outputs: Sequence[Tensor]) -> None:
        """Go back to the main stream and go on where all streams have ended.

        `held` is only named here so that it lives until now. `outputs` are the caller's from now on.
        """


@dataclasses.dataclass(frozen=True)
class Branched:
    """A graph that `branches.branched` wrote, as a function of its inputs."""

    graph: fx.GraphModule
    open_streams: Callable[[], contextlib.AbstractContextManager[Streams]]

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Flat tensors in, flat tensors out, all on the caller's stream."""
        with self.open_streams() as streams:
            outputs: Sequence[Tensor] = self.graph(streams, *tensors)
        return outputs


class CudaStreams:
    """CUDA's streams beside `main`, which is current, under capture too: there, waits become edges.

    PyTorch hands a freed block to the next operator on the stream that it was allocated on, which is only
    right where every use of the block comes before. A block that is used on its own stream alone is safe.
    For the others, the join sends every stream behind the end of all, so that whoever allocates on one of
    them afterwards, this engine or another user of PyTorch's few streams, comes later than the last use.
    Outputs are used after that, so the allocator is told to wait for the main stream, too. A capture has
    memory of its own, and its streams must end at the join, so there neither is done.
    """

    def __init__(self, main: torch.cuda.Stream) -> None:
        """Only `main` is there until the fork."""
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
    """The streams for one call, from the current stream of a device; that is current again afterwards.

    Where the call fails, the streams are joined all the same: what it has launched still runs.
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
