"""CUDA streams: what is told to CUDA, in which order; on a GPU, that calls are right in any company."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, fx, nn

from ampopt.engines import streams as streams_module
from ampopt.engines.branches import branched, plan
from ampopt.engines.streams import Branched, CudaStreams, cuda_streams
from ampopt.ir.graph import aten
from tests.helpers import Model, program_of

CUDA = torch.device("cuda")


class _Stream:
    """Writes down what CUDA is told; an event is the name of its stream."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def record_event(self) -> str:
        self._log.append(f"record {self.name}")
        return self.name

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} after {event}")

    def wait_stream(self, other: _Stream) -> None:
        self._log.append(f"{self.name} after {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    others = [_Stream("one", log), _Stream("two", log)]
    own = Mock(beside=lambda main, count: others[:count])
    monkeypatch.setattr(streams_module, "_own", own)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"on {stream.name}"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return log


def _call(log: list[str], *outputs: Tensor) -> list[str]:
    streams = CudaStreams(_Stream("main", log))  # type: ignore[arg-type]
    streams.fork(3)
    streams.launch_on(1)
    event = streams.record()
    streams.launch_on(2)
    streams.wait(event)
    streams.join([], outputs)
    return log


FORK = ["record main", "one after main", "two after main"]
WORK = ["on one", "record one", "on two", "two after one"]
JOIN = ["main after one", "main after two", "on main"]


def test_every_stream_goes_on_after_the_join(log: list[str]) -> None:
    """Memory that was freed before must not be handed out earlier."""
    assert _call(log) == [*FORK, *WORK, *JOIN, *FORK]


def test_a_capture_ends_at_the_join(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    output = Mock(is_cuda=True)
    assert _call(log, output) == [*FORK, *WORK, *JOIN]
    output.record_stream.assert_not_called()


def test_the_allocator_is_told_who_uses_the_outputs(log: list[str]) -> None:
    on_device, on_host = Mock(is_cuda=True), Mock(is_cuda=False)
    _call(log, on_device, on_host)
    (used_by,) = on_device.record_stream.call_args.args
    assert used_by.name == "main"
    on_host.record_stream.assert_not_called()


def _engine(model: nn.Module, x: Tensor) -> Branched:
    module = program_of(model, x).graph
    return Branched(branched(module, plan(module.graph, 4)), functools.partial(cuda_streams, x.device))


def _branches(m: Model, x: Tensor) -> list[Tensor]:
    heads = [x + float(k) for k in range(4)]
    for _ in range(6):
        heads = [torch.tanh(head * 1.5) for head in heads]
    return [torch.cat(heads), *heads]


@pytest.mark.gpu
def test_on_a_gpu_a_call_leaves_the_callers_stream_current() -> None:
    x, own = torch.randn(8, 8, device="cuda"), torch.cuda.Stream()
    engine = _engine(Model(_branches), x)
    with torch.cuda.stream(own):
        engine(x)
        assert torch.cuda.current_stream() == own


@pytest.mark.gpu
def test_on_a_gpu_a_call_that_fails_does_too() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    results = [graph.call_function(aten.neg.default, (x,)), graph.call_function(aten.mm.default, (x, x))]
    graph.output(tuple(results))
    module = fx.GraphModule(nn.Module(), graph)
    engine = Branched(branched(module, plan(graph, 4)), functools.partial(cuda_streams, CUDA))
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        engine(torch.randn(2, 3, device="cuda"))
    assert torch.cuda.current_stream() == before
    good = torch.randn(3, 3, device="cuda")
    assert torch.equal(engine(good)[1], good @ good)


@pytest.mark.gpu
def test_on_a_gpu_memory_is_not_handed_out_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream is late in every call, several callers' streams take turns, and outputs are let go of."""
    plain = CudaStreams.launch_on

    def late(self: CudaStreams, stream: int) -> None:
        plain(self, stream)
        torch.cuda._sleep(300_000)

    monkeypatch.setattr(CudaStreams, "launch_on", late)
    draws = [torch.randn(512, 256, device="cuda") for _ in range(4)]
    expected = [[t.clone() for t in _branches(Model(_branches), x)] for x in draws]
    engine = _engine(Model(_branches), draws[0])
    callers = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    wrong = []
    for number in range(60):
        with torch.cuda.stream(callers[number % 3]):
            outputs = engine(draws[number % 4])
            torch.cuda._sleep(300_000)
            pairs = zip(outputs, expected[number % 4], strict=True)
            wrong.append(torch.stack([(a != b).any() for a, b in pairs]).any())
            del outputs
    torch.cuda.synchronize()
    assert not torch.stack(wrong).any()


@pytest.mark.gpu
def test_on_a_gpu_several_threads_may_call_it() -> None:
    draws = [torch.randn(64, 64, device="cuda") for _ in range(8)]
    engine = _engine(Model(_branches), draws[0])

    def work(number: int) -> bool:
        x = draws[number % 8]
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            outputs, expected = engine(x), _branches(Model(_branches), x)
            return all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(80)))
