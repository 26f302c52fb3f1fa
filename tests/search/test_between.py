"""The code between optimized submodules: graphs of it are optimized, and right for calls of any kind."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.batched import keypoints
from ampopt.measure.headline import Compared
from ampopt.measure.sampling import Gain, Measurement
from ampopt.search import regions
from ampopt.search.between import Between
from ampopt.search.options import Options
from ampopt.search.partly_optimized import PartlyOptimizedModule
from tests.helpers import with_statistics
from tests.support import snapshot
from tests.support.planted import optimize

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


pytestmark = pytest.mark.usefixtures("through_dynamo")


@pytest.fixture(autouse=True)
def _all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are optimized however little time they take."""
    monkeypatch.setattr("ampopt.search.between.LEAST", 0.0)


class Finder(nn.Module):
    """Normalizes an image, and describes the pixels that are bright enough, as a detector does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The bright pixels' boxes and their number."""
        scaled = ((x - self.mean) / 0.3).clamp(-2.0, 2.0) * 1.5 + 0.1
        score = self.body(scaled).mean(1)
        found = (score > score.mean()).nonzero()
        boxes = torch.cat([found[:, 1:].float() - 1.0, found[:, 1:].float() + 1.0], 1)
        return {"boxes": (boxes * 0.5).clamp(min=0.0) + 0.25, "count": torch.tensor(len(boxes))}


class Counting(Finder):
    """One that also counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """With the number of the call."""
        self.calls += 1
        return {**super().forward(x), "calls": torch.tensor(self.calls)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[key].shape == b[key].shape and torch.allclose(a[key], b[key], atol=1e-5) for key in a
    )


def made(model: nn.Module | None = None) -> tuple[nn.Module, PartlyOptimizedModule]:
    model = Finder() if model is None else model
    with_statistics(model)
    before = snapshot.of_torch()
    fast = optimize(model, X, precision="fp32", cache=False)
    assert snapshot.differences(before, snapshot.of_torch()) == []
    return model, fast


def graphs(fast: PartlyOptimizedModule) -> list[str]:
    return [name for name in fast.report.regions if name.startswith("test_between.py:")]


def test_graphs_of_the_code_between_are_optimized_and_right_for_other_calls() -> None:
    model, fast = made()
    assert "body" in fast.report.regions
    assert graphs(fast), fast.report.notes
    assert fast.report.chosen == "fp32"
    for x in (X, -X, X * 3, X[:1], X[..., :5], X.double()[..., :6].float()):
        assert same(fast(x), model(x))


@pytest.mark.parametrize(
    "scope",
    [torch.inference_mode, torch.enable_grad, contextlib.nullcontext],
    ids=["inference", "grad", "none"],
)
def test_it_is_right_in_every_mode_of_the_caller(scope: Any) -> None:
    model, fast = made()
    with scope():
        found = fast(X)
    assert same(found, model(X))


def test_neither_capture_nor_timing_advances_the_state_and_it_can_be_reset() -> None:
    model = Counting()
    fast = made(model)[1]
    for _ in range(3):
        assert same(fast(X), model(X))
    fast.reset_state()
    model.calls = 0
    assert same(fast(X), model(X))
    assert graphs(fast), fast.report.notes


def test_where_the_code_between_is_no_faster_the_submodules_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    even = Compared(Measurement((1.0,)), Measurement((1.0,)), Gain(1.0, 0.99, 1.01), None)
    monkeypatch.setattr("ampopt.search.regions.PartwiseOptimizer._looked", lambda *_: even)
    model, fast = made()
    assert list(fast.report.regions) == ["body"]
    assert "the code between submodules runs as it was: it is not faster" in fast.report.notes
    assert same(fast(X), model(X))


def test_without_time_to_trace_it_the_code_between_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.search.regions.TRACING", 1e6)
    monkeypatch.setattr("ampopt.search.regions.Between", None)
    model, fast = made()
    assert same(fast(X), model(X))
    assert "the code between submodules runs as it was: there was no time to trace it" in fast.report.notes


@pytest.mark.parametrize(("took_s", "rounds"), [(0.0, 2), (1e6, 1)])
@pytest.mark.parametrize("call_s", [0.1, 1.0])
def test_comparing_forms_goes_on_only_while_the_last_comparison_has_time(
    took_s: float, rounds: int, call_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[float]()

    def undecided(before: object, after: object, *, seconds: float) -> Compared:
        compared.append(seconds)
        return Compared(Measurement((call_s,)), Measurement((call_s,)), Gain(1.0, 0.9, 1.1), None)

    options = Options().within(60.0)
    sandbox: Any = None
    work = regions.PartwiseOptimizer(
        Finder(), (X,), {}, options, "", started=time.perf_counter(), progress=print, sandbox=sandbox
    )
    monkeypatch.setattr(regions, "compare_to_decide", undecided)
    monkeypatch.setattr(work, "_comparing_s", took_s)
    work._compared(Finder(), Finder())
    assert len(compared) == (rounds if call_s < 0.5 else 1)


def test_where_dynamo_fails_the_submodules_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **options: Any) -> None:
        raise RuntimeError("internal error")

    monkeypatch.setattr("torch.compile", failing)
    model, fast = made()
    assert list(fast.report.regions) == ["body"]
    assert "the code between submodules runs as it was: RuntimeError: internal error" in fast.report.notes
    assert same(fast(X), model(X))


def scaled(part: Tensor) -> Tensor:
    return ((part - 0.5) * 2.0).tanh() * 3.0 + part.abs().sqrt()


class Averaging(nn.Module):
    """Averages frames in an attribute, and branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The average, brightened where it is dark."""
        if self.average is None:
            self.average = torch.zeros_like(x)
        self.average = (self.average * 0.9 + x.clamp(-2.0, 2.0) * 0.1).tanh() * 1.1
        return self.average + 1.0 if self.average.mean() < 0 else self.average * 1.0


def test_a_state_in_an_attribute_is_no_weight() -> None:
    model, fast = Averaging(), optimize(Averaging(), X, precision="fp32", cache=False)
    assert graphs(fast), fast.report.notes
    for x in (X, -X, X * 2.0, X, -3.0 * X):
        assert torch.allclose(fast(x), model(x), atol=1e-5)
    fast.reset_state()
    assert torch.allclose(fast(X), Averaging()(X), atol=1e-5)


class Looping(nn.Module):
    """No submodule, a loop over a list, and a branch and a size that depend on values."""

    def forward(self, parts: list[Tensor]) -> Tensor:
        """The rows of all parts that are large, scaled."""
        rows = [part[:0] for part in parts]
        for part in parts:
            large = scaled(part)
            if large.sum() > 0:
                rows.append(large[large.sum(1) > 0])
        return torch.cat(rows) * 0.5


def test_loops_of_code_without_submodules() -> None:
    model, parts = Looping(), [torch.randn(5, 4), torch.randn(3, 4)]
    fast = optimize(model, (parts,), precision="fp32", cache=False)
    assert graphs(fast), fast.report.notes
    for call in (parts, [-part for part in parts], parts * 2, parts[:1]):
        assert torch.allclose(fast(call), model(call), atol=1e-5)


def test_no_graph_is_made_for_the_sizes_of_the_boxes_that_the_example_has() -> None:
    class Heads(nn.Module):
        def forward(self, maps: Tensor, boxes: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            return keypoints.found_in(maps * 2.0, [boxes])

    maps, boxes = torch.rand(3, 2, 7, 7), torch.tensor([[0.0, 0.0, 9.0, 5.0]]) * torch.tensor([[1], [2], [3]])
    between = Between(lambda call: call(maps, boxes), Heads())
    targets = [node.target for part in between.parts for node in part.graph.graph.nodes]
    assert targets
    assert torch.nn.functional.interpolate not in targets
    for given in (boxes, boxes * 0.7):
        torch.testing.assert_close(between.served(maps, given), Heads()(maps, given))


@pytest.mark.gpu
def test_on_a_gpu_the_code_between_is_right_for_other_calls() -> None:
    model = Finder().cuda()
    with_statistics(model)
    fast = optimize(model, X.cuda(), precision="fp32", cache=False)
    assert graphs(fast), fast.report.notes
    for x in (X, -X, X * 3, X[:1], X[..., :5]):
        assert same(fast(x.cuda()), model(x.cuda()))
