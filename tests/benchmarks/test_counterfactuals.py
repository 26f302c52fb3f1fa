"""Counterfactuals measured again: remedies by hand compute what the model does; what differs is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.diagnosis.findings import cold_calls
from ampopt.system.flags import cuda_math
from benchmarks.counterfactual_networks import PLANTED, Scaled, network
from benchmarks.counterfactual_process import CLOCKS, LEAST, sampled
from benchmarks.counterfactual_ways import Run, Way, prepared, ways_of
from benchmarks.counterfactuals import write_row
from benchmarks.counterfactuals_table import certainly_differs, differs, gain_differs, to_markdown

CPU = torch.device("cpu")


def small() -> nn.Module:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=4, stride=2)),
        *(nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )
    model[1].running_mean.normal_()  # type: ignore[operator]
    return model.eval()


def result(way: Way, model: nn.Module, x: Tensor) -> Tensor:
    """What a way of a network with one output gives."""
    (found,) = pytree.tree_leaves(prepared(way, model, (x,)).call())
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("lane", ["fp32", "amp"])
@pytest.mark.parametrize(
    "remedy",
    [
        *("as it is", "channels_last", "heap given back", "after idling"),
        *(
            "graph as it is",
            "graph under autocast",
            "graph folded",
            "graph with other groups",
            "graph without no-ops",
        ),
    ],
)
@torch.no_grad()
def test_a_remedy_computes_what_the_model_does(lane: str, remedy: str) -> None:
    x = torch.randn(2, 3, 16, 16)
    expected = small()(x)
    found = result(Way(lane, remedy), small(), x)
    assert torch.allclose(found.float(), expected, atol=1e-5 if lane == "fp32" else 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("remedy", ["as it is", "CUDA graph", "channels_last", "searched", "graph folded"])
@torch.no_grad()
def test_a_remedy_on_a_gpu_computes_what_the_model_does(remedy: str) -> None:
    x = torch.randn(2, 3, 16, 16, device="cuda")
    with cuda_math(tf32=False, search=False):  # puts back what the way sets
        expected = small().cuda()(x)
        found = result(Way("amp", remedy), small().cuda(), x)
    assert torch.allclose(found.float(), expected, atol=1e-2)


@torch.no_grad()
def test_what_is_merged_or_computed_once_is_the_same() -> None:
    x, chain = torch.randn(3, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    found = result(Way("fp32", "graph merged"), chain, x)
    assert torch.allclose(found, chain(x), atol=1e-5)
    scaled = Scaled(8)
    once = result(Way("fp32", "graph computed once"), scaled, x)
    assert torch.allclose(once, scaled(x), atol=1e-5)


@torch.no_grad()
def test_a_layer_alone_is_padded() -> None:
    model, x = nn.Sequential(nn.ReLU(), nn.Conv2d(6, 10, 3, stride=2)), torch.randn(1, 6, 9, 9)
    shapes = []
    for remedy in ("alone", "alone and padded"):
        found: Any = prepared(Way("amp", remedy, "1"), model, (x,)).call()
        shapes.append((tuple(found.shape), found.dtype))
    assert shapes == [((1, 10, 4, 4), torch.bfloat16), ((1, 16, 4, 4), torch.bfloat16)]


def test_the_findings_of_a_diagnosis_have_ways() -> None:
    told: dict[str, Any] = {
        "lane": "amp",
        "places": ["1.conv, net.py:3"],
        "advice": "torch.set_num_threads(2)",
    }
    assert ways_of({**told, "name": "memory-layout"}) == (Way("amp"), Way("amp", "channels_last"))
    assert ways_of({**told, "name": "amp-pays", "lane": "fp32"}) == (Way("fp32"), Way("amp"))
    assert ways_of({**told, "name": "amp-harmful"}) == (Way("amp"), Way("fp32"))
    assert ways_of({**told, "name": "misaligned-channels"}) == (
        *(Way("amp", "alone", "1.conv"), Way("amp", "alone and padded", "1.conv")),
    )
    assert ways_of({**told, "name": "cpu-threads"}) == (Way("amp"), Way("amp", "threads", "2"))
    assert ways_of({**told, "name": "batch-norm"}) == (
        Way("amp", "graph as it is"),
        Way("amp", "graph folded"),
    )
    assert ways_of({**told, "name": "page-faults"}) == (Way("amp", "heap given back"), Way("amp"))
    assert not Way("amp", "heap given back").environment
    assert "MALLOC_TRIM_THRESHOLD_" in Way("amp").environment
    assert ways_of({**told, "name": "new"}) is None


def test_a_kind_in_training_mode_is_evaluated_as_the_diagnosis_did() -> None:
    told: dict[str, Any] = {"lane": "fp32", "name": "dropout-in-training-mode"}
    alone = {"change": "after eval() of its dropouts alone"}
    given, dropouts = Way("fp32", "as given"), Way("fp32", "one kind evaluated", "dropout")
    assert ways_of({**told, "counterfactual": {"change": "after model.eval()"}}) == (given, Way("fp32"))
    assert ways_of({**told, "counterfactual": alone}) == (given, dropouts)
    assert ways_of({**told, "name": "rrelu-in-training-mode", "counterfactual": alone}) is None
    whole = {"name": "training-mode", "counterfactual": {"change": "after model.eval()"}}
    assert ways_of({**told, **whole}) == (given, Way("fp32"))
    modes = {}
    for way in (given, dropouts, Way("fp32")):
        model = small().train()
        prepared(way, model, (torch.randn(2, 3, 16, 16),))
        modes[way.remedy] = [model[1].training, model[4].training]  # type: ignore[index]
    assert modes == {
        "as given": [True, True],
        "one kind evaluated": [True, False],
        "as it is": [False, False],
    }


def test_a_call_after_a_pause_is_one_in_one_thread_where_the_diagnosis_says_so() -> None:
    told: dict[str, Any] = {"lane": "fp32", "name": "slow-after-idling"}
    one = Way("fp32", "in one thread after idling")
    assert ways_of(told) == (Way("fp32", "after idling"), Way("fp32", "second after idling"))
    assert ways_of({**told, "counterfactual": {"change": cold_calls.IN_ONE_THREAD}}) == (
        Way("fp32", "after idling"),
        one,
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run = prepared(one, small(), (torch.randn(2, 3, 16, 16),))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert run.before is not None


@pytest.mark.parametrize("name", PLANTED)
@torch.no_grad()
def test_planted_faults_are_networks_that_run(name: str) -> None:
    model, inputs = network(name, CPU)
    assert model.training is (name == "in training mode")
    assert isinstance(model(*inputs), Tensor)


def test_a_rest_comes_before_every_call_and_is_not_timed() -> None:
    order: list[str] = []
    run = Run(lambda: order.append("call"), lambda: order.append("rest"))
    assert len(sampled(run, CPU, CLOCKS["cpu"], 0.0)) == LEAST
    assert order[:4] == ["rest", "call", "rest", "call"]


def figure(ms: float, spread: float = 0.0) -> dict[str, float]:
    return {"ms": ms, "low": ms - spread, "high": ms + spread, "tenth": ms, "samples": 9}


def counterfactual(said: float, alone: float, spread: float = 0.0) -> dict[str, Any]:
    sides = {
        "before": {"way": "fp32, as it is", "diagnosed": figure(4.0), "alone": figure(4.0)},
        "after": {
            "way": "fp32, channels_last",
            "diagnosed": figure(said, spread),
            "alone": figure(alone, spread),
        },
    }
    return {"finding": "memory-layout", "lane": "fp32", "gain": {"ratio": 4.0 / said}, **sides}


def row(network: str, *found: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {
        "network": network,
        "commit": "c0ffee",
        "load": 0.5,
        "clock": "cpu",
        "counterfactuals": list(found),
        **facts,
    }


def test_a_figure_differs_from_a_tenth_on_and_certainly_where_intervals_are_apart() -> None:
    assert not differs(counterfactual(2.1, 2.0))
    assert differs(counterfactual(2.3, 2.0))
    assert certainly_differs(counterfactual(2.3, 2.0))
    assert certainly_differs(counterfactual(2.0, 2.5))
    assert not certainly_differs(counterfactual(2.3, 2.0, spread=0.2))
    assert gain_differs(counterfactual(2.3, 2.0))
    drifted = counterfactual(2.3, 2.0)
    drifted["before"]["diagnosed"] = figure(4.6)
    drifted["gain"]["ratio"] = 2.0
    assert differs(drifted)
    assert not gain_differs(drifted)


def test_the_table_has_both_figures_and_the_share_that_differs(tmp_path: Path) -> None:
    broken = counterfactual(2.0, 2.0)
    broken["after"] = {"way": "fp32, channels_last", "diagnosed": figure(2.0), "error": "status 1"}
    write_row(tmp_path, row("resnet18", counterfactual(2.1, 2.0), broken, not_measured=["new"]))
    write_row(tmp_path, row("linear5x128", counterfactual(2.5, 2.0)))
    rows = json.loads((tmp_path / "counterfactuals.json").read_text())
    text = (tmp_path / "counterfactuals.md").read_text()
    assert text == to_markdown(rows)
    assert "| linear5x128 | memory-layout (fp32) | 4 (4 to 4) | 4 (4 to 4) | +0% | 2.5 (2.5 to 2.5) |" in text
    assert "| **+25%** | 1.60 | 2.00 | cpu | 0.5 | c0ffee |" in text
    assert "- by their medians: 1 (50%)" in text
    assert "- resnet18, fp32, channels_last: status 1" in text
    assert "- resnet18: not measured alone: new" in text
