"""One program for a range of sizes is kept where it is about as fast; else the report says why not."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import InputError
from ampopt.measure.headline import Compared
from ampopt.measure.sampling import Measurement, gain
from ampopt.search import size_search
from tests.helpers import Model, with_statistics
from tests.support.planted import keep_the_patched, optimize

BATCH = {"batch": (1, 8)}


def net() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))


def image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def times(monkeypatch: pytest.MonkeyPatch, *sized: float) -> None:
    """Let the program for the range take so long, in turn, where the static one takes 1."""

    def compare(before: Any, after: Any, *, seconds: float) -> Compared:
        before(), after()
        measured = Measurement((1.0,) * 20), Measurement(sized * (20 // len(sized)))
        return Compared(*measured, gain(*measured), None)

    keep_the_patched(monkeypatch)
    monkeypatch.setattr(size_search, "compare_fairly", compare)


def optimized(model: nn.Module, x: Any, **options: Any) -> OptimizedModule:
    fast = optimize(model, x, precision="fp32", cache=False, budget_s=300.0, **options)
    assert isinstance(fast, OptimizedModule)
    return fast


def notes(fast: OptimizedModule) -> str:
    return "; ".join(fast.report.notes)


def test_a_program_that_is_about_as_fast_is_kept_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, 1.05)
    model = net()
    fast = optimized(model, image(), dynamic=BATCH)
    assert fast.sizes == {"batch": (1, 8)}
    assert "one program for batch 1 to 8, verified at " in notes(fast)
    assert "1.05x (1.05 to 1.05) the static program's time at batch 2" in notes(fast)
    for batch in range(1, 9):
        assert torch.allclose(fast(image(batch)), model(image(batch)), atol=1e-5)
    assert fast.health.late_captures == 0


def test_a_range_whose_end_takes_longer_than_there_is_time_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times(monkeypatch, 1.0)
    monkeypatch.setattr(size_search, "sized_program", pytest.fail)
    model = net()
    fast = optimized(model, image(), dynamic={"height": (4, 10**9)})
    assert fast.sizes == {}
    assert "at height 1000000000 its inputs are 1.25e+08 times as large as the example's" in notes(fast)
    assert "give a smaller range" in notes(fast)
    assert torch.allclose(fast(image()), model(image()), atol=1e-5)


@pytest.mark.parametrize(
    ("sized", "reason"), [((1.2,), "it takes over 1.1x"), ((0.9, 1.3), "it may take over 1.1x")]
)
def test_a_slower_program_is_not_kept(
    sized: tuple[float, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times(monkeypatch, *sized)
    model = net()
    fast = optimized(model, image(), dynamic=BATCH)
    assert fast.sizes == {}
    assert f"each size gets a program of its own, not one for batch 1 to 8: {reason}" in notes(fast)
    assert torch.allclose(fast(image(3)), model(image(3)), atol=1e-5)
    assert fast.health.late_captures == 1


def test_a_model_that_decides_by_the_size_stays_static_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, 1.0)
    torch.manual_seed(0)
    model = Model(lambda m, x: m.net(x) if x.shape[0] == 1 else 2 * m.net(x), net=net()).eval()
    fast = optimized(model, image(), dynamic=BATCH)
    assert fast.sizes == {}
    assert "the program is wrong at batch 1" in notes(fast)
    for batch in (1, 2, 3):
        assert torch.allclose(fast(image(batch)), model(image(batch)), atol=1e-5)


def test_an_error_in_the_comparison_leaves_the_static_program(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, 1.0)

    def fail(*_args: Any, **_options: Any) -> NoReturn:
        raise ValueError("out of order")

    monkeypatch.setattr(size_search, "compare_fairly", fail)
    fast = optimized(net(), image(), dynamic=BATCH)
    assert fast.sizes == {}
    assert fast.report.chosen == "fp32"
    assert "not one for batch 1 to 8: ValueError: out of order" in notes(fast)


def test_no_time_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, 1.0)
    monkeypatch.setattr("ampopt.search.optimizer.find_sized_program", _without_time)
    assert "the time budget was spent when 0 of " in notes(optimized(net(), image(), dynamic=BATCH))


def _without_time(optimized: Any, static: Any, sizes: Any, left_s: Any) -> Any:
    return size_search.find_sized_program(optimized, static, sizes, lambda: 0.0)


@pytest.mark.parametrize(
    "dynamic",
    [
        {"bath": (1, 8)},
        {"batch": (8, 1)},
        {"batch": (3, 8)},
        {"batch": (1, 2.5)},
        {"y": {0: (1, 8)}},
        "batch",
    ],
)
def test_wrong_ranges_are_refused_before_the_search(dynamic: Any) -> None:
    with pytest.raises(InputError, match="dynamic"):
        ampopt.optimize(net(), image(), dynamic=dynamic, progress=False)


def test_a_model_that_is_not_one_graph_says_that_ranges_have_no_effect() -> None:
    model = Model(lambda m, x: m.net(x) if float(x.sum()) > 0 else m.net(-x), net=net()).eval()
    fast = optimize(model, image(), precision="fp32", cache=False, budget_s=200.0, dynamic=BATCH)
    assert "dynamic= has no effect on a model that is not one graph" in fast.report.notes
    assert torch.allclose(fast(image(3)), model(image(3)), atol=1e-5)
