"""torch.compile(backend=ampopt's): graphs are optimized and right, or run as they were and say why."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import InputError
from ampopt.search.optimizer import Optimizer
from ampopt.system.turns import optimizing
from ampopt.torch_compile import backend, compiled_graphs
from tests.helpers import Model, with_statistics
from tests.support.planted import NO_ENGINES

OPTIONS: dict[str, Any] = {"exclude": NO_ENGINES, "budget_s": 20.0, "cache": False, "progress": False}
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


pytestmark = pytest.mark.usefixtures("through_dynamo")


class InTwoGraphs(nn.Module):
    """A network with a break between its body and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Classify."""
        y = self.body(x)
        torch._dynamo.graph_break()
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


def in_two_graphs() -> InTwoGraphs:
    model = InTwoGraphs()
    with_statistics(model)
    return model


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model.eval(), backend=backend, dynamic=False, options={**OPTIONS, **options})


def test_every_graph_is_optimized_for_each_shape_and_right() -> None:
    model = in_two_graphs()
    fast = compiled(model)
    before = compiled_graphs()  # those of earlier tests, until they are collected
    for x in (X, X, X[:1], X[..., :6]):
        assert torch.allclose(fast(x), model(x), atol=1e-5)
    found = [graph for graph in compiled_graphs() if graph not in before]
    assert len(found) >= 4
    assert all(graph.is_current and graph.report.chosen == "fp32" for graph in found)
    assert any("fold-conv-bn" in graph.report.lanes["fp32"].passes for graph in found)


@pytest.mark.parametrize(
    ("given", "budget_s"), [({}, 300.0), ({"budget_s": None}, 300.0), ({"budget_s": 5.0}, 5.0)]
)
def test_without_a_budget_slow_graphs_get_more_time(
    given: dict[str, Any], budget_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(optimizer: Optimizer) -> OptimizedModule:
        seen.append(optimizer._options.budget_s)
        raise InputError("seen")

    seen: list[float] = []
    monkeypatch.setattr("ampopt.search.optimizer.seconds_of_a_call", lambda *_: 0.5)
    monkeypatch.setattr(Optimizer, "run", run)
    model = nn.Conv2d(3, 4, 3).eval()
    options = {"exclude": NO_ENGINES, "cache": False, "progress": True, **given}
    assert torch.allclose(torch.compile(model, backend=backend, options=options)(X), model(X), atol=1e-5)
    assert seen == [budget_s]


def test_with_other_weights_a_graph_runs_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    model = in_two_graphs()
    fast = compiled(model)
    fast(X)
    with caplog.at_level(logging.WARNING, "ampopt"):
        for _ in range(2):
            model.head.weight.mul_(2.0)
            assert torch.allclose(fast(X), model(X), atol=1e-5)
    assert [r.message for r in caplog.records if "weights have changed" in r.message][1:] == []
    assert any("weights have changed" in record.message for record in caplog.records)


def test_equal_weights_of_another_tensor_are_taken() -> None:
    model = in_two_graphs()
    fast, before = compiled(model), compiled_graphs()
    fast(X)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert torch.allclose(fast(X), model(X), atol=1e-5)
    assert all(graph.is_current for graph in compiled_graphs() if graph not in before)


def test_statistics_that_training_has_changed_are_noticed() -> None:
    model = in_two_graphs()
    fast = compiled(model)
    fast(X)
    model.train()
    model(X * 3.0 + 1.0)  # nothing counts this write
    model.eval()
    assert torch.allclose(fast(X), model(X), atol=1e-5)


def test_what_a_graph_refuses_is_not_written_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    def chosen(m: Any, x: Tensor, place: Tensor) -> Tensor:
        return m.conv(x)[:, place]  # type: ignore[no-any-return]

    model = Model(chosen, conv=nn.Conv2d(3, 4, 3))
    fast, place = compiled(model), torch.tensor([1, 3])
    assert torch.allclose(fast(X, place), model(X, place), atol=1e-5)
    model.get_parameter("conv.weight").mul_(2.0)  # it runs as it was
    assert torch.allclose(fast(X, place), model(X, place), atol=1e-5)
    with pytest.raises(IndexError, match="out of bounds"):
        fast(X, torch.tensor([1, 4]))
    assert "Traceback" not in capfd.readouterr().err


def _appended(m: Any, x: Tensor) -> Tensor:
    m.seen.add_(1.0)
    return m.conv(x) + m.seen  # type: ignore[no-any-return]


AS_IT_WAS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "only views": (lambda m, x: (x.view(-1), x[0], m.conv.weight.T), "views"),
    "a part of another result": (lambda m, x: ((y := m.conv(x))[:, :2], y[:, 1:]), "a part of its memory"),
    "random numbers": (lambda m, x: m.conv(x) + torch.rand(4, 1, 1), "random"),
    "it writes its input": (lambda m, x: m.conv(x.mul_(0.5)), "changes its"),
    "it writes a buffer": (_appended, "changes its buffer"),
}


@pytest.mark.parametrize("name", AS_IT_WAS)
def test_what_cannot_be_optimized_runs_as_it_was(name: str, caplog: pytest.LogCaptureFixture) -> None:
    function, reason = AS_IT_WAS[name]
    model = Model(function, conv=nn.Conv2d(3, 4, 3))
    seen = torch.zeros(())
    model.register_buffer("seen", seen)
    fast, mine = compiled(model), [X.clone(), X.clone()]
    with caplog.at_level(logging.WARNING, "ampopt"):
        torch.manual_seed(1)
        found = fast(mine[0])
    seen.zero_()
    torch.manual_seed(1)
    expected = model(mine[1])
    pairs = zip(*((each,) if isinstance(each, Tensor) else each for each in (found, expected)), strict=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    assert torch.equal(*mine)
    (said,) = [record.message for record in caplog.records if "runs as it was" in record.message]
    assert reason in said


def _wide(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


SYMBOLS: dict[str, tuple[list[tuple[Any, ...]], str]] = {
    "sizes": ([(X,), (X[:1],), (torch.cat([X, X]),)], "its sizes may change"),
    "strides": ([(X,), (_wide(X),), (torch.stack([X] * 3, -1)[..., 0],)], "the strides of its inputs may"),
    "numbers": ([(X, 2), (X, 3), (X, 5)], "numbers in Python may change"),
    "two": ([(X, 2), (torch.cat([X, X]), 3), (X, 4)], "its sizes and numbers in Python may change"),
    "all": (
        [(X, 2), (_wide(torch.cat([X, X])), 3)],
        "its sizes and the strides of its inputs and numbers in Python may change",
    ),
}


@pytest.mark.parametrize("name", SYMBOLS)
def test_what_may_change_from_call_to_call_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    calls, reason = SYMBOLS[name]
    model = Model(lambda m, x, n=1: m.conv(x).relu() * n, conv=nn.Conv2d(3, 4, 3))
    fast = torch.compile(model.eval(), backend=backend, options=OPTIONS)
    with caplog.at_level(logging.WARNING, "ampopt"):
        for each in calls:
            assert torch.allclose(fast(*each), model(*each), atol=1e-5)
    said = [record.message for record in caplog.records if "from call to call" in record.message]
    assert said
    assert all(reason in each for each in said)
    assert all(each.endswith("torch.compile(..., dynamic=False) makes a graph for each") for each in said)


def test_where_gradients_may_be_needed_they_are_there(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with caplog.at_level(logging.WARNING, "ampopt"), torch.enable_grad():
        compiled(model)(torch.randn(2, 3)).sum().backward()
    assert model[0].weight.grad is not None
    assert any("may need gradients" in record.message for record in caplog.records)


def test_while_another_thread_optimizes_a_graph_runs_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    model, begun, over = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), threading.Event(), threading.Event()

    def hold() -> None:
        with optimizing.taken():
            begun.set()
            over.wait(60.0)

    other = threading.Thread(target=hold)
    other.start()
    begun.wait(60.0)
    x = torch.randn(2, 3)
    try:
        with caplog.at_level(logging.WARNING, "ampopt"):
            assert torch.allclose(compiled(model)(x), model(x))
    finally:
        over.set()
        other.join()
    assert any("another thread optimizes" in record.message for record in caplog.records)


def _views(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = m.conv(x).relu()
    return x.view(-1), y, y[:, 1], m.conv.bias, (y + 1).mean((2, 3), keepdim=True).expand(-1, -1, 2, 2)


def test_results_that_are_views_are_views_of_the_same(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(_views, conv=nn.Conv2d(3, 4, 3))
    fast, before = compiled(model), compiled_graphs()
    for base in (X, torch.stack([X, X])[1]):
        mine, other = X.clone(), base.clone()
        expected, found = model(mine), fast(other)
        assert found[3].data_ptr() == model.get_parameter("conv.bias").data_ptr()
        for place in (0, 2):  # later code writes to them
            expected[place].mul_(2.0)
            found[place].mul_(2.0)
        assert torch.equal(mine, other)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
            assert a.stride() == b.stride()
    assert [g.report.chosen for g in compiled_graphs() if g not in before] == ["fp32"]
    assert [record.message for record in caplog.records if record.name == "ampopt"] == []


def test_results_have_the_strides_that_later_code_may_rely_on() -> None:
    model = Model(lambda m, x: m.conv(x).relu().permute(0, 2, 3, 1), conv=nn.Conv2d(3, 4, 3))
    found, expected = compiled(model)(X), model(X)
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bugdet_s": 3.0}, "unknown option 'bugdet_s': choose of amp_dtype"),
        ({"precision": "fp17"}, "fp17"),
        ({"outputs": "static"}, "unknown option 'outputs'"),
        ({"progress": "often"}, "progress='often': give True or False"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match="InputError") as caught:
        compiled(nn.Linear(3, 4), **options)(torch.randn(2, 3))
    assert said in str(caught.value)


def test_a_mode_is_refused() -> None:
    with pytest.raises(Exception, match="the backend has no modes"):
        torch.compile(nn.Linear(3, 4), backend=backend, mode="max-autotune")(torch.randn(2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_on_a_gpu_graphs_are_optimized_and_right(precision: str) -> None:
    model = in_two_graphs().cuda()
    fast = compiled(model, precision=precision)
    for x in (X.cuda(), X.cuda() * 2.0, X[:1].cuda()):
        assert torch.allclose(fast(x), model(x), atol=1e-5 if precision == "fp32" else 3e-2)
