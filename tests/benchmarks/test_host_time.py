"""What a call costs beyond its kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampopt.passes import FoldConvBn
from benchmarks.host_time import beyond_replay, measure_network, to_markdown, write_row
from tests.support.planted import module_of
from tests.support.small_net import PASSES, image, net


@pytest.mark.gpu
def test_the_call_of_a_captured_program_is_compared_with_the_replay_of_its_graph() -> None:
    x = image()
    fast = module_of(net(), x, passes=PASSES)
    found = beyond_replay(fast, (x,), x.device)
    assert found is not None
    assert abs(found) < 1e3


def test_there_is_nothing_to_say_of_programs_without_a_graph() -> None:
    x = torch.randn(1, 3, 8, 8)
    fast = module_of(nn.Conv2d(3, 4, 1), x, passes=(FoldConvBn(),))
    assert beyond_replay(fast, (x,), x.device) is None


@pytest.mark.gpu
def test_a_network_is_measured_in_both_lanes() -> None:
    with torch.no_grad():
        row = measure_network("conv3x64", torch.device("cuda", 0))
    assert set(row["lanes"]) == {"fp32", "amp"}
    for lane in row["lanes"].values():
        assert lane["results"] == 1
        assert lane["call"]["p50_ms"] > 0.0
        assert abs(lane["beyond_replay_us"]) < 1e3
        assert 0.0 < lane["host call"]["p50_ms"] < lane["call"]["p50_ms"] + 0.1


def row(network: str, **lanes: Any) -> dict[str, Any]:
    return {"network": network, "environment": {"device": "a GPU"}, "commit": "abc", "lanes": lanes}


def measured(call_ms: float, replay_ms: float) -> dict[str, Any]:
    beyond = round(1e3 * (call_ms - replay_ms), 2)
    times = {"call": {"p50_ms": call_ms}, "replay": {"p50_ms": replay_ms}}
    return {**times, "beyond_replay_us": beyond, "host_beyond_us": 3.25, "results": 1}


def test_rows_are_kept_and_a_failure_has_one_too(tmp_path: Path) -> None:
    write_row(tmp_path, row("conv3x64", fp32=measured(0.25, 0.24), amp={"error": "ValueError: no"}))
    write_row(tmp_path, row("resnet18", amp=measured(0.104, 0.1)))
    kept = json.loads((tmp_path / "host_time.json").read_text())
    assert [each["network"] for each in kept] == ["resnet18", "conv3x64"]
    table = (tmp_path / "host_time.md").read_text()
    assert table == to_markdown(kept)
    assert "| conv3x64 | fp32 | 1 | 250.0 | 240.0 | 10.0 | 3.2 | abc |" in table
    assert "| conv3x64 | amp | – | ValueError: no | – | – | – | abc |" in table
    assert "median 7.0 µs, least 4.0 µs, most 10.0 µs, over 2" in table
