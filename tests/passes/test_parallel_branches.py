"""parallel-branches: branches on several streams give the graph's own bits, and what has none is declined."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ampopt.engines.branches import plan
from ampopt.engines.executable import executable
from ampopt.engines.streams import Branched
from ampopt.ir.graph import aten, calls, copy_of
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.program import Program
from ampopt.ir.settings import Settings
from ampopt.ir.transform import Numerics, Pass, Result
from ampopt.passes import BakeAutocast, ChannelsLast, CudaGraph, FoldConvBn, ParallelBranches
from tests.helpers import (
    BF16,
    FP16,
    Model,
    apply_to_untouched,
    check_outputs,
    check_pass,
    program_of,
    with_statistics,
)
from tests.simulated_streams import SimulatedStreams

CUDA = torch.device("cuda")
SHAPE = (2, 4, 12, 12)
OF_THE_PROGRAM_ITSELF = 0.05
"""The error allowed where every bit stays anyway: rounding turns over some of the mask of `heads`."""


class OnCpu(ParallelBranches):
    """The pass where there is no GPU; the fixture `calls_made` simulates the streams."""

    def why_not(self, program: Program) -> str | None:
        return super().why_not(program.replace(device=CUDA))


@pytest.fixture
def calls_made(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedStreams]:
    """The streams of every call that an engine made."""
    made: list[SimulatedStreams] = []

    def open_streams(_device: torch.device) -> SimulatedStreams:
        made.append(SimulatedStreams())
        return made[-1]

    monkeypatch.setattr("ampopt.passes.parallel_branches.cuda_streams", open_streams)
    return made


def _conv(inputs: int, outputs: int, size: int, dilation: int = 1) -> nn.Module:
    padding = dilation * (size // 2)
    conv = nn.Conv2d(inputs, outputs, size, padding=padding, dilation=dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class _Inception(nn.Module):
    """GoogLeNet's block: four branches, then a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _conv(4, 4, 1), nn.Sequential(_conv(4, 3, 1), _conv(3, 6, 3))
        self.c = nn.Sequential(_conv(4, 2, 1), _conv(2, 4, 3), _conv(4, 4, 3))
        self.d = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _conv(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x), self.c(x), self.d(x)], 1)


class _Pyramid(nn.Module):
    """DeepLab's atrous pyramid: dilated branches, and one with the image's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([_conv(4, 4, 1), _conv(4, 4, 3, 2), _conv(4, 4, 3, 4)])
        self.pooled, self.last = _conv(4, 4, 1), _conv(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.adaptive_avg_pool2d(x, 1))
        spread = F.interpolate(pooled, x.shape[-2:], mode="bilinear", align_corners=False)
        out: Tensor = self.last(torch.cat([*(branch(x) for branch in self.branches), spread], 1))
        return out


class _Residual(nn.Module):
    """ResNet's block with a convolution on the shortcut, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shortcut = _conv(4, 4, 3), _conv(4, 4, 3), _conv(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = (self.second(self.first(x)) + self.shortcut(x)).relu()
        return x


class _Heads(nn.Module):
    """A detector's heads: several outputs, one of them a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.boxes, self.scores = _conv(4, 4, 3), _conv(4, 4, 3), _conv(4, 8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.trunk(x)
        scores = self.scores(y).flatten(2)
        return {"boxes": self.boxes(y).flatten(2).transpose(1, 2), "scores": scores, "mask": scores > 0.5}


class _Split(nn.Module):
    """YOLO's block: half of the channels go through convolutions, and all of it is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = _conv(2, 2, 3), _conv(2, 2, 3), _conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.tanh().chunk(2, 1)
        out: Tensor = self.last(torch.cat([left, right, a := self.a(right), self.b(a) + self.b(left)], 1))
        return out


class _Attention(nn.Module):
    """Queries, keys and values from one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x.flatten(1, 2)).unflatten(2, (3, 4)) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "inception": lambda: nn.Sequential(_Inception(), _conv(16, 4, 1), _Inception()),
    "pyramid": _Pyramid,
    "residual": _Residual,
    "heads": _Heads,
    "split": _Split,
    "attention": _Attention,
}


def _model(name: str) -> nn.Module:
    return with_statistics(MODELS[name]())


@pytest.mark.parametrize("name", MODELS)
def test_the_branches_give_the_bits_of_the_graph(name: str, calls_made: list[SimulatedStreams]) -> None:
    elsewhere = [torch.randn(1, 4, 9, 12)]
    result = check_pass(OnCpu(), _model(name), torch.randn(SHAPE), rewrites=1, elsewhere=elsewhere)
    assert isinstance(result.program.engine, Branched)
    assert calls_made
    assert [race for call in calls_made for race in call.races] == []


@pytest.mark.parametrize(
    ("lane", "before"),
    [
        pytest.param(FP32, [FoldConvBn(), ChannelsLast()], id="folded channels_last"),
        pytest.param(BF16, [BakeAutocast(), FoldConvBn(), ChannelsLast()], id="baked"),
    ],
)
def test_it_runs_rewritten_programs(
    lane: Lane, before: list[Pass], calls_made: list[SimulatedStreams]
) -> None:
    check_pass(OnCpu(), _model("inception"), torch.randn(SHAPE), rewrites=1, lane=lane, on_top_of=before)
    assert [race for call in calls_made for race in call.races] == []


def test_no_more_streams_are_used_than_asked_for() -> None:
    graph = program_of(_model("inception"), torch.randn(SHAPE)).graph.graph
    assert [plan(graph, streams).streams for streams in (2, 3, 4, 8)] == [2, 3, 4, 4]


def test_a_second_apply_does_nothing() -> None:
    once = ParallelBranches().apply(program_of(_model("heads"), torch.randn(SHAPE))).program
    assert once.engine is not None
    assert apply_to_untouched(ParallelBranches(), once).rewrites == 0


def _on_cuda(model: nn.Module, *, lane: Lane = FP32) -> Program:
    return program_of(model, torch.randn(SHAPE), lane=lane).replace(device=CUDA)


def _with_target(target: Callable[..., object], *more: float) -> Program:
    """A program with two branches, one of which calls `target`."""
    program = _on_cuda(Model(lambda m, x: x.tanh() + x.exp()))
    module = copy_of(program.graph)
    node = next(calls(module, [aten.exp.default]))
    node.target, node.args = target, (*node.args, *more)
    return program.with_graph(module)


def _identity(x: Tensor) -> Tensor:
    return x


DECLINED: dict[str, tuple[Callable[[], Program], str]] = {
    "a CPU": (lambda: program_of(_model("heads"), torch.randn(SHAPE)), "there is no CUDA device"),
    "autocast": (lambda: _on_cuda(_model("heads"), lane=BF16), "it still runs under autocast"),
    "another engine": (lambda: _on_cuda(_model("heads")).replace(engine=_identity), "another engine runs it"),
    "a chain": (
        lambda: _on_cuda(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())),
        "no two of its operators can run side by side",
    ),
    "a write": (lambda: _with_target(aten.relu_.default), "exp: it changes its argument"),
    "random numbers": (
        lambda: _with_target(aten.dropout.default, 0.5, True),
        "exp: it draws random numbers",
    ),
    "no operator": (lambda: _with_target(_identity), "exp: it may write to its arguments"),
    "statistics": (
        lambda: _with_statistics_that_change(),
        "batch_norm: it changes its running statistics",
    ),
}


def _with_statistics_that_change() -> Program:
    program = _on_cuda(_model("heads"))
    module = copy_of(program.graph)
    norm = next(calls(module, [aten.batch_norm.default]))
    norm.args = tuple(True if argument is False else argument for argument in norm.args)
    return program.with_graph(module)


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_declined(name: str) -> None:
    build, reason = DECLINED[name]
    found = str(ParallelBranches().why_not(build()))
    assert re.sub(r" \(\S*(, )?\S*\.py:\d+\)", "", found) == reason  # but for the place in the model


def test_a_single_stream_is_declined() -> None:
    reason = ParallelBranches(streams=1).why_not(_on_cuda(_model("heads")))
    assert reason == "no two of its operators can run side by side"


def test_every_bit_stays_unless_algorithms_are_searched() -> None:
    program = program_of(nn.Linear(3, 2), torch.randn(1, 3))
    searching = program.replace(settings=Settings(search_algorithms=True))
    assert ParallelBranches().numerics_on(program) is Numerics.BITWISE
    assert ParallelBranches().numerics_on(searching) is Numerics.REASSOCIATED


class _ForgetsToWait(OnCpu):
    """An engine that leaves out one wait."""

    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        assert isinstance(result.program.engine, Branched)
        graph = result.program.engine.graph
        graph.graph.erase_node(_waits(graph)[0])
        graph.recompile()
        return result


def _waits(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if (node.op, node.target) == ("call_method", "wait")]


def test_the_check_catches_a_wait_that_is_left_out(calls_made: list[SimulatedStreams]) -> None:
    x = torch.randn(SHAPE)
    _ForgetsToWait().apply(program_of(_model("residual"), x)).program.run(x)
    assert any("may come before its input" in race for race in calls_made[0].races)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("launch", [[], [CudaGraph()]], ids=["launched call by call", "cuda graph"])
@pytest.mark.parametrize(
    ("lane", "before"),
    [
        pytest.param(FP32, [], id="fp32"),
        pytest.param(FP16, [BakeAutocast(), FoldConvBn(), ChannelsLast()], id="baked channels_last"),
    ],
)
def test_on_a_gpu_the_branches_give_the_bits_of_the_graph(
    name: str, launch: list[Pass], lane: Lane, before: list[Pass]
) -> None:
    model, x = _model(name).cuda(), torch.randn(SHAPE, device="cuda")
    program = program_of(model, x, lane=lane, on_top_of=before)
    assert ParallelBranches().why_not(program) is None
    after = apply_to_untouched(ParallelBranches(), program).program
    for step in launch:
        after = step.apply(after).program
    assert isinstance(after.engine, Branched)
    check_outputs(Numerics.BITWISE, program, after, model, [x], lane, limit=OF_THE_PROGRAM_ITSELF)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("captured", [False, True], ids=["launched call by call", "cuda graph"])
def test_on_a_gpu_fifty_calls_with_changing_inputs_give_the_bits_of_the_graph(
    name: str, captured: bool
) -> None:
    """Larger than the caches of a GPU's cores, and called without waiting, so that calls overlap."""
    shape = (8, 4, 96, 12)
    model = _model(name).cuda()
    program = program_of(model, torch.randn(shape, device="cuda"))
    run = executable(ParallelBranches().apply(program).program.replace(cuda_graph=captured))
    draws = [torch.randn(shape, device="cuda") for _ in range(50)]
    outputs = [run(x) for x in draws]
    for x, found in zip(draws, outputs, strict=True):
        for a, b in zip(found, program.run(x), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_on_a_gpu_a_capture_is_replayed_on_another_stream_too() -> None:
    x = torch.randn(SHAPE, device="cuda")
    program = program_of(_model("inception").cuda(), x)
    run = executable(ParallelBranches().apply(program).program.replace(cuda_graph=True))
    expected = program.run(x)[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(run(x)[0], expected)
