"""A size gets a CUDA graph when it comes back; others run without, and all are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ampopt
from ampopt.deploy.runtime import OptimizedModule
from ampopt.engines import graph_per_size
from ampopt.engines.cuda_graphs import CapturedGraph
from ampopt.engines.graph_per_size import CALLS, MOST_COUNTED, MOST_GRAPHS, GraphPerSize
from ampopt.errors import PassError
from ampopt.ir.lanes import lanes_for
from ampopt.ir.program import Program
from ampopt.passes import BakeAutocast, ChannelsLast, CudaGraph, FoldConvBn
from tests.helpers import Model, with_statistics
from tests.support.planted import captured_of
from tests.support.sized import sized_module

BATCH = {"batch": (1, 16)}


def program() -> Program:
    return captured_of(Model(lambda m, x: x + 1), torch.zeros(1, 3))[1].program


def image(batch: int, size: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that were captured."""
    sizes: list[int] = []

    def capture(program: Program, *, outputs: str) -> Callable[..., tuple[Tensor, ...]]:
        assert outputs == "copy"
        sizes.append(len(program.examples[0]))
        return program.run

    monkeypatch.setattr(graph_per_size, "CapturedGraph", capture)
    return sizes


def assert_one_more(run: GraphPerSize, batch: int) -> None:
    x = torch.rand(batch, 3)
    assert torch.equal(run(x)[0], x + 1)


def test_a_size_is_captured_once_when_it_comes_back(captured: list[int]) -> None:
    run = GraphPerSize(program())
    for _ in range(CALLS - 1):
        for batch in (1, 2):
            assert_one_more(run, batch)
    assert captured == []
    for _ in range(3):
        assert_one_more(run, 2)
    assert captured == [2]
    assert_one_more(run, 1)
    assert captured == [2, 1]


def test_sizes_that_come_later_than_the_most_graphs_run_without(captured: list[int]) -> None:
    run = GraphPerSize(program())
    for batch in range(1, MOST_GRAPHS + 4):
        for _ in range(CALLS + 1):
            assert_one_more(run, batch)
    assert captured == list(range(1, MOST_GRAPHS + 1))


def test_sizes_that_never_come_back_are_not_counted_for_ever(captured: list[int]) -> None:
    run = GraphPerSize(program())
    for batch in range(1, MOST_COUNTED + 2):
        assert_one_more(run, batch)
    assert (captured, len(run._calls)) == ([], 1)


@pytest.mark.parametrize(
    "error", [PassError("the CUDA graph could not be captured"), RuntimeError("no memory")]
)
def test_a_size_whose_capture_fails_runs_without_and_is_not_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[Program] = []

    def refuse(program: Program, *, outputs: str) -> Any:
        tries.append(program)
        raise error

    monkeypatch.setattr(graph_per_size, "CapturedGraph", refuse)
    run = GraphPerSize(program())
    for _ in range(CALLS + 3):
        assert_one_more(run, 4)
    assert len(tries) == 1
    assert f"sizes [[4, 3]] run without a CUDA graph: {type(error).__name__}: {error}" in caplog.text


def test_a_capture_in_a_call_in_inference_mode_makes_no_tensors_of_that_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[bool] = []

    def capture(program: Program, *, outputs: str) -> Callable[..., tuple[Tensor, ...]]:
        modes.append(torch.is_inference_mode_enabled() or torch.is_grad_enabled())
        return program.run

    monkeypatch.setattr(graph_per_size, "CapturedGraph", capture)
    run = GraphPerSize(program())
    for _ in range(CALLS):
        with torch.inference_mode():
            assert_one_more(run, 4)
    assert modes == [False]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
    head = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 5)
    return with_statistics(torch.nn.Sequential(*layers, *head)).cuda()


def graphs_of(fast: OptimizedModule) -> list[int]:
    sized = fast._sized
    assert sized is not None
    assert isinstance(sized.run, GraphPerSize)
    held = sized.run._captured.items()
    return [sizes[0][0] for sizes, run in held if isinstance(run, CapturedGraph)]


@pytest.mark.gpu
@pytest.mark.parametrize("lane", ["fp32", "amp"])
def test_on_a_gpu_each_size_of_a_range_is_right_before_and_after_its_graph(lane: str) -> None:
    model = net()
    mixed = (BakeAutocast(),) if lane == "amp" else ()
    passes = (FoldConvBn(), *mixed, ChannelsLast(), CudaGraph())
    (own,) = lanes_for(lane, torch.device("cuda"), None)
    fast = sized_module(model, image(4), dynamic=BATCH, passes=passes, lane=own)
    kept: list[tuple[Tensor, Tensor]] = []
    for turn in range(CALLS + 2):
        for batch in (16, 1, 7, 3):
            x = image(batch, seed=10 * turn + batch)
            with torch.no_grad():
                expected = model(x)
            kept.append((fast(x), expected))
    limit = 5e-3 if lane == "amp" else 1e-3  # TF32
    for found, expected in kept:  # no call writes into what another has given back
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert float((found - expected).norm()) <= limit * float(expected.norm())
    assert graphs_of(fast) == [16, 1, 7, 3]
    assert fast.health.late_captures + fast.health.served_by_original == 0


@pytest.mark.gpu
def test_on_a_gpu_heights_and_widths_vary_under_graphs() -> None:
    model = net()
    fast = sized_module(
        model, image(2), dynamic={"height": (8, 40), "width": (8, 40)}, passes=(FoldConvBn(), CudaGraph())
    )
    for _ in range(CALLS + 1):
        for height, width in ((8, 8), (40, 9), (17, 33)):
            x = torch.randn(2, 3, height, width, device="cuda")
            with torch.no_grad():
                expected = model(x)
            assert float((fast(x) - expected).norm()) <= 1e-3 * float(expected.norm())
    assert len(graphs_of(fast)) == 3


@pytest.mark.gpu
def test_on_a_gpu_a_range_is_found_by_optimize_saved_loaded_and_exported(tmp_path: Path) -> None:
    model = net()
    fast = ampopt.optimize(
        model, image(4), dynamic=BATCH, precision="fp32", exclude=("compile",), budget_s=40, progress=False
    )
    assert isinstance(fast, OptimizedModule)
    notes = "; ".join(fast.report.notes)
    assert "verified at" in notes or "1.1x" in notes, notes  # kept, or too slow; never refused
    fast.export_onnx(tmp_path / "range.onnx", dynamic="batch")
    onnx = pytest.importorskip("onnx")
    [value] = onnx.load(tmp_path / "range.onnx").graph.input
    assert value.type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.gpu
def test_on_a_gpu_a_bundle_for_a_range_answers_all_sizes(tmp_path: Path) -> None:
    model = net()
    fast = sized_module(model, image(4), dynamic=BATCH, passes=(FoldConvBn(), CudaGraph()))
    fast.save(tmp_path / "robot.ampopt", tune_s=1.0)
    loaded = ampopt.load(tmp_path / "robot.ampopt", backend="ampopt")
    for _ in range(CALLS + 1):
        for batch in (16, 2):
            x = image(batch, seed=batch)
            with torch.no_grad():
                expected = model(x)
            assert float((loaded(x) - expected).norm()) <= 1e-3 * float(expected.norm())
