"""CUDA graphs of calls: what CUDA is told in which order, and which instance is taken."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.engines import graph_capture
from ampopt.engines.cuda_graphs import CapturedGraph
from ampopt.engines.graph_capture import (
    INSTANCES,
    LONG_GRAPH_S,
    ReplayedProgram,
    as_captured,
    by_speed,
    capture_calls,
    capture_program,
)
from ampopt.errors import PassError
from ampopt.ir.program import Program
from ampopt.ir.settings import Settings
from ampopt.measure import sampling
from tests.helpers import BF16, program_of
from tests.support.small_net import image, net

CPU = torch.device("cpu")
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class _Cuda:
    """CUDA's streams and graphs, which write down what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        cuda: Any = torch.cuda
        for name, stand_in in {
            "Stream": lambda: _Stream("side", self.log),
            "current_stream": lambda device=None: _Stream("main", self.log),
            "stream": self.stream,
            "set_stream": lambda stream: self.log.append(f"back on {stream.name}"),
            "synchronize": lambda: self.log.append("synchronize"),
            "CUDAGraph": self.graph,
            "graph": self.capture,
        }.items():
            monkeypatch.setattr(cuda, name, stand_in)
        clear = lambda: self.log.append("clear workspaces")  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear)

    def said(self, what: str) -> None:
        self.log.append(what)

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")

    def graph(self, keep_graph: bool = False) -> _Graph:
        self.log.append("graph to read" if keep_graph else "graph")
        return _Graph(self.log)

    @contextlib.contextmanager
    def capture(self, graph: _Graph, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"  # other threads may go on
        self.log.append("capture")
        yield
        self.log.append("captured")


class _Stream:
    cuda_stream = 0x50

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self._log.append(f"{self.name} after {other.name}")


class _Graph:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def instantiate(self) -> None:
        self._log.append("instantiate")

    def replay(self) -> None:
        self._log.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    return _Cuda(monkeypatch)


def test_warm_ups_run_on_a_side_stream_before_the_one_call_that_is_captured(cuda: _Cuda) -> None:
    outputs = [(torch.tensor(count),) for count in range(3)]
    calls = iter(outputs)

    def body() -> tuple[Tensor, ...]:
        cuda.said("call")
        return next(calls)

    graph, static = capture_calls(body, warm_ups=2)
    assert static is outputs[2]
    assert isinstance(graph, _Graph)
    assert cuda.log == [
        "side after main", "on side", "call", "call", "off side", "main after side", "synchronize",
        "graph", "clear workspaces", "capture", "call", "captured", "clear workspaces",
    ]  # fmt: skip


def test_what_was_called_already_needs_no_warm_up(cuda: _Cuda) -> None:
    capture_calls(lambda: cuda.said("call") or (), warm_ups=0)  # type: ignore[func-returns-value]
    assert cuda.log.count("call") == 1


def test_a_graph_whose_nodes_are_to_be_read_is_made_ready_at_once(cuda: _Cuda) -> None:
    capture_calls(lambda: (), keep_graph=True)
    assert "graph to read" in cuda.log
    assert cuda.log[-3:] == ["captured", "clear workspaces", "instantiate"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("operation not permitted\nand a long trace"), "RuntimeError: operation not permitted"),
        (NotImplementedError(), "NotImplementedError"),
    ],
    ids=["with a message", "without"],
)
@pytest.mark.parametrize("after", [0, graph_capture.WARM_UPS], ids=["in a warm-up", "in the capture"])
def test_a_call_that_cannot_be_captured_is_a_pass_error_with_its_first_line(
    after: int, error: Exception, reason: str, cuda: _Cuda
) -> None:
    def body() -> tuple[Tensor, ...]:
        if cuda.log.count("call") == after:
            raise error
        cuda.said("call")
        return ()

    with pytest.raises(PassError, match=f"^the CUDA graph could not be captured: {reason}$") as caught:
        capture_calls(body)
    assert caught.value.__cause__ is error
    assert cuda.log.count("clear workspaces") == (0 if after == 0 else 2)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("search", [False, True])
def test_programs_that_search_algorithms_are_captured_in_a_thread_of_their_own(search: bool) -> None:
    program = program_of(nn.ReLU(), X)
    program = program.replace(settings=Settings(search_algorithms=search))
    seen: list[tuple[str, bool]] = []

    def body() -> tuple[Tensor, ...]:
        seen.append((threading.current_thread().name, torch.is_grad_enabled()))
        return ()

    capture_program(program, body, warm_ups=1)
    thread = "ampopt-cudnn-search_0" if search else threading.current_thread().name
    assert seen == [(thread, False)] * 2


class _Ready:
    """An instance of a graph that takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.launched = seconds, list[int]()

    def launch(self, stream: int) -> None:
        self.launched.append(stream)


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every instance take the seconds that it says, and be sampled three times."""

    def device_time(replay: Any, device: torch.device) -> Callable[[], float]:
        def sample() -> float:
            replay()
            return float(replay.func.__self__.seconds)

        return sample

    def few(samplers: Any, seconds: float, least: int) -> Any:
        return {name: sampling.Measurement((sampler(),) * 3) for name, sampler in samplers.items()}

    monkeypatch.setattr(graph_capture, "device_time", device_time)
    monkeypatch.setattr(graph_capture, "interleave", few)


@pytest.mark.usefixtures("cuda", "_clock")
def test_instances_come_with_the_fastest_first() -> None:
    instances: list[Any] = [_Ready(seconds) for seconds in (3e-4, 1e-4, 2e-4)]
    found: list[Any] = by_speed(instances, CPU)
    assert [ready.seconds for ready in found] == [1e-4, 2e-4, 3e-4]
    assert all(set(ready.launched) == {_Stream.cuda_stream} for ready in instances)


@pytest.mark.usefixtures("cuda", "_clock")
def test_instances_of_a_long_graph_are_not_worth_the_time() -> None:
    instances: list[Any] = [_Ready(2 * LONG_GRAPH_S), _Ready(1e-4)]
    assert by_speed(instances, CPU) == instances
    assert instances[1].launched == []


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program for whose capture nothing is done but one run."""
    log: list[str] = []
    monkeypatch.setattr(graph_capture, "capture_program", lambda program, body: (_Graph(log), body()))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x51, raising=False)
    return program_of(nn.ReLU(), X)


def test_a_replay_launches_the_fastest_of_several_instances(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[_Ready] = []

    def ready(graph: object) -> _Ready:
        made.append(_Ready(0))
        return made[-1]

    monkeypatch.setattr(graph_capture, "ReadyGraph", ready)
    monkeypatch.setattr(graph_capture, "by_speed", lambda instances, device: list(reversed(instances)))
    replayed = ReplayedProgram(program)
    replayed.replay()
    assert len(made) == INSTANCES
    assert [ready.launched for ready in made] == [[]] * (INSTANCES - 1) + [[0x51]]


def test_the_examples_stay_the_callers(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_capture, "ReadyGraph", lambda graph: _Ready(0))
    monkeypatch.setattr(graph_capture, "by_speed", lambda instances, device: list(instances))
    replayed = ReplayedProgram(program)
    (own,) = replayed._inputs
    assert torch.equal(own, X)
    assert own.data_ptr() != program.examples[0].data_ptr()
    assert torch.equal(replayed._outputs[0], X.relu())


@pytest.mark.parametrize("refusal", [AttributeError("too old"), RuntimeError("no libcuda")])
def test_without_the_driver_the_captured_graph_is_replayed(
    refusal: Exception, program: Program, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(graph: object) -> object:
        raise refusal

    monkeypatch.setattr(graph_capture, "ReadyGraph", refuse)
    with caplog.at_level("INFO", "ampopt"):
        replayed: Any = ReplayedProgram(program)
    assert f"{type(refusal).__name__}: {refusal}" in caplog.text
    replayed.replay()
    assert replayed._graph._log == ["replay"]


@pytest.mark.gpu
def test_on_a_gpu_a_graph_computes_what_its_call_did() -> None:
    x = torch.randn(4, device="cuda")
    graph, (y,) = capture_calls(lambda: (x * 2 + 1,))
    x.copy_(torch.arange(4.0))
    graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [1, 3, 5, 7]


@pytest.mark.gpu
def test_on_a_gpu_a_graph_outlives_the_workspaces_and_graphs_before_it() -> None:
    """Its product is split along the sum, for which cuBLAS takes a workspace."""
    a, b = (torch.randn(shape, device="cuda", dtype=torch.float16) for shape in ((64, 65536), (65536, 64)))
    expected = (a @ b).clone()
    before, _ = capture_calls(lambda: (a @ b,))
    graph, (product,) = capture_calls(lambda: (a @ b,))
    del before
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    full = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(16)]
    product.zero_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(product, expected)
    assert all(bool(each.isnan().all()) for each in full)


@pytest.mark.gpu
def test_on_a_gpu_a_call_that_waits_for_the_host_cannot_be_captured() -> None:
    x = torch.ones(1, device="cuda")
    with pytest.raises(PassError, match="the CUDA graph could not be captured"):
        capture_calls(lambda: (x * x.item(),))
    assert (x + 1).item() == 2  # and the process can go on


@pytest.mark.gpu
def test_on_a_gpu_a_replayed_program_writes_its_outputs() -> None:
    program = program_of(net(), image())
    replayed = ReplayedProgram(program)
    replayed.replay()
    torch.cuda.synchronize()
    assert torch.allclose(replayed._outputs[0], program.run(image())[0], atol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_a_graph_in_garbage_does_not_end_during_a_capture() -> None:
    program = program_of(net(), image()).replace(device=torch.device("cuda"))
    program = program.replace(graph=program.graph.cuda(), examples=(image().cuda(),))
    old, x = [CapturedGraph(program), CapturedGraph(program)], torch.ones(3, device="cuda")

    def body() -> tuple[Tensor, ...]:
        if torch.cuda.is_current_stream_capturing():
            ring: list[Any] = [old.pop()]
            ring.append(ring)
            del ring
            _ = [[] for _ in range(10_000)]  # more than starts a collection
        return (x + 1,)

    before = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    try:
        for _ in range(2):
            graph, outputs = capture_calls(body)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    graph.replay()
    torch.cuda.synchronize()
    assert not old
    assert outputs[0].tolist() == [2.0] * 3


def test_what_makes_no_search_is_captured_in_a_thread_that_never_made_one() -> None:
    """A thread keeps its plans of cuDNN for each dtype, and so the searched ones."""
    plain = program_of(nn.Linear(3, 3), X)
    searching = plain.replace(settings=Settings(search_algorithms=True))

    def threads() -> list[str]:
        programs = plain, searching, plain.replace(lane=BF16)
        names = [as_captured(program, lambda: threading.current_thread().name) for program in programs]
        return [name.rpartition("_")[0] for name in names]

    def work() -> None:
        assert threads() == ["mine", "ampopt-cudnn-search", "mine"]
        searching.run(X)
        assert threads() == ["ampopt-cudnn-plain", "ampopt-cudnn-search", "mine"]

    with ThreadPoolExecutor(1, thread_name_prefix="mine") as pool:
        pool.submit(work).result()
