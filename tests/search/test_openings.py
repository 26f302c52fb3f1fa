"""Openings against the results that they are made of."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampopt.ir.lanes import FP32, LANES, Lane
from ampopt.ir.program import Program
from ampopt.passes import PIPELINE
from ampopt.search.lane_search import LaneSearch
from ampopt.search.openings import DEPTHWISE_IN_AMP, EXACT, OPENINGS, Opening, opening_of
from tests.helpers import BF16, FP16, program_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = {step.name for step in PIPELINE}
DENSE = nn.Conv2d(8, 8, 3)


def on(device: str, lane: Lane, net: nn.Module) -> Program:
    """A network's first program in a lane, as if it were on the device."""
    program = program_of(net.eval(), torch.ones(1, 8, 6, 6), lane=lane)
    return program.replace(device=torch.device(device))


def winners(lane: str) -> list[list[str]]:
    """The passes of ampopt's programs in the race on the H200."""
    rows = json.loads((RESULTS / "h200" / "peers.json").read_text())
    return [passes for row in rows if (passes := row["contestants"].get(f"ampopt {lane}", {}).get("passes"))]


@pytest.mark.parametrize("lane", ["fp32", "amp"])
def test_what_wins_often_is_tried_early_and_only_what_wins_seldom_late(lane: str) -> None:
    won = winners(lane)
    assert len(won) > 20
    count = Counter(name for passes in won for name in passes)
    opening = OPENINGS["cuda", lane != "fp32"]
    for name in set(opening.rewrites) - {*EXACT}:
        assert count[name] >= len(won) / 3, name
    for name in opening.late:
        assert count[name] < 0.4 * len(won), name
    often = {name for name in count if count[name] > len(won) / 2}
    assert not often & {*opening.late}


def test_what_an_engine_outdoes_has_won_nowhere_beside_it() -> None:
    files = [*RESULTS.glob("cpu-*/peers.json"), *RESULTS.glob("cpu-*/peers_repeated.json")]
    won = [passes for file in files for passes in passes_in(json.loads(file.read_text()))]
    beside = [passes for passes in won if OPENINGS["cpu", False].engine in passes]
    assert len(beside) > 30
    outdone = {name for opening in OPENINGS.values() for name in opening.outdone}
    assert outdone
    assert not [passes for passes in won if outdone & {*passes}]


def passes_in(found: Any) -> Iterator[list[str]]:
    """All lists of passes in results."""
    values = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    for value in values:
        yield from passes_in(value)
    if isinstance(found, dict) and isinstance(passes := found.get("passes"), list):
        yield passes


@pytest.mark.parametrize("opening", [*OPENINGS.values(), DEPTHWISE_IN_AMP])
def test_an_opening_names_passes_of_the_pipeline(opening: Opening) -> None:
    assert {*opening.rewrites, *opening.late, *opening.outdone, opening.engine} <= NAMES | {None}
    assert {*opening.inseparable} <= {*opening.rewrites}


def test_a_lane_of_lower_precision_bakes_it_in_its_opening() -> None:
    for by_device in LANES.values():
        for device, lane in by_device.items():
            opening = opening_of(on(device, lane, DENSE), PIPELINE)
            assert (lane.baked_by in opening.rewrites) == lane.is_mixed


@pytest.mark.parametrize(
    ("net", "engine", "outdone"),
    [
        (nn.Sequential(nn.Flatten(), nn.Softmax(1)), "compile", ()),
        (DENSE, "onnx-runtime", ("compile",)),
        (nn.Sequential(nn.Flatten(2), nn.GRU(36, 8)), "onnx-runtime", ("compile",)),
    ],
)
def test_a_graph_without_products_opens_with_inductor_on_a_cpu(
    net: nn.Module, engine: str, outdone: tuple[str, ...]
) -> None:
    """As for two boxes' overlap, 4,775 times in a call: entering another engine takes as long."""
    opening = opening_of(on("cpu", FP32, net), PIPELINE)
    assert (opening.engine, opening.outdone) == (engine, outdone)


def test_a_device_without_results_has_no_opening() -> None:
    assert opening_of(on("meta", FP32, DENSE), PIPELINE) == Opening(())


@pytest.mark.parametrize(
    ("device", "lane", "net", "has_kernels"),
    [
        ("cuda", FP16, nn.Conv2d(8, 8, 3, groups=8), True),
        ("cuda", FP32, nn.Conv2d(8, 8, 3, groups=8), False),
        ("cpu", BF16, nn.Conv2d(8, 8, 3, groups=8), False),
        ("cuda", FP16, nn.Conv2d(8, 16, 3, groups=8), False),
        ("cuda", FP16, nn.Conv2d(8, 8, 3, groups=4), False),
        ("cuda", FP16, DENSE, False),
    ],
)
def test_depthwise_convolutions_open_with_kernels_that_are_measured(
    monkeypatch: pytest.MonkeyPatch, device: str, lane: Lane, net: nn.Module, has_kernels: bool
) -> None:
    """Of them compilers are not told ahead: they begin on what comes before the layout."""
    monkeypatch.setattr("ampopt.search.openings.is_available", lambda: True)
    program = on(device, lane, net)
    assert ("fuse-conv-triton" in opening_of(program, PIPELINE).rewrites) is has_kernels
    ahead = {step.name for step in LaneSearch.expected(program, PIPELINE)}
    assert ("channels-last" in ahead) is (lane.is_mixed and not has_kernels)
    assert not ahead & {"fuse-conv-triton", "fuse-conv-act"}
    assert "fold-conv-bn" in ahead


@pytest.mark.parametrize(("has_triton", "left_out"), [(False, ()), (True, ("fuse-conv-triton",))])
def test_without_those_kernels_they_open_as_others_do(
    monkeypatch: pytest.MonkeyPatch, has_triton: bool, left_out: tuple[str, ...]
) -> None:
    monkeypatch.setattr("ampopt.search.openings.is_available", lambda: has_triton)
    program = on("cuda", FP16, nn.Conv2d(8, 8, 3, groups=8))
    assert opening_of(program, PIPELINE.without(*left_out)) == OPENINGS["cuda", True]
