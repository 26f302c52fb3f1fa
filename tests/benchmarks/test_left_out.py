"""What transforms that are left out could gain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ampopt.ir.graph import aten, calls
from ampopt.ir.shapes import record_shapes
from benchmarks.left_out import _alike, _gain, _random, measure_lane, measure_network, to_markdown
from tests.helpers import Model
from tests.support.planted import module_of


def test_equal_calls_are_timed_once_and_counted() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([m.a(m.b(m.c(x))), x], 1)

    convs = {name: nn.Conv2d(3, 3, 3, padding=1, stride=1) for name in "ab"}
    model = Model(forward, **convs, c=nn.Conv2d(3, 3, 3, padding=2, dilation=2))
    program = module_of(model, torch.randn(1, 3, 8, 8), passes=()).program
    module = record_shapes(program)
    assert sorted(count for _, count in _alike(list(calls(module, [aten.conv2d.default])))) == [1, 2]
    assert [count for _, count in _alike(list(calls(module, [aten.cat.default])))] == [1]


def test_random_operands_are_laid_out_as_the_networks_also_where_places_are_shared() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([m.token.expand(4, -1, -1), x.transpose(1, 2)], 1)

    model = Model(forward, token=nn.Parameter(torch.randn(1, 1, 8)))
    program = module_of(model, torch.randn(4, 8, 5), passes=()).program
    (cat,) = calls(record_shapes(program), [aten.cat.default])
    found = [_random(part, torch.device("cpu")) for part in cat.all_input_nodes]
    assert [(*each.shape, *each.stride()) for each in found] == [(4, 1, 8, 0, 8, 1), (4, 5, 8, 40, 1, 5)]
    assert all(each.unique().numel() > 7 for each in found)


def test_a_gain_is_that_of_the_best_form_and_never_negative() -> None:
    times = {"as it is": 1.0, "+5 +0": 0.5, "+5 +0, copied": 0.9, "+0 +4": 0.95}
    assert _gain(times, copied=False) == 0.5
    assert _gain(times, copied=True) == pytest.approx(0.1)
    assert _gain({"as it is": 1.0, "+0 +4": 2.0}, copied=False) == 0.0


def row(lane: dict[str, Any]) -> dict[str, Any]:
    return {
        "network": "conv3x64",
        "environment": {"device": "a GPU"},
        "commit": "abc",
        "lanes": {"amp": lane},
    }


def test_the_table_shows_shares_and_failures() -> None:
    times = {"padding_ms": 0.1, "padding_copied_ms": 0.02, "concatenation_ms": 0.05}
    table = to_markdown([row({"ms": 1.0, "concatenations": 3, **times}), row({"error": "ValueError: no"})])
    assert "| conv3x64 | amp | 1.000 | 10.0% | 2.0% | 3 | 5.0% |" in table
    assert "| conv3x64 | amp | ValueError: no | – | – | – | – |" in table


@pytest.mark.gpu
def test_what_is_padded_and_joined_is_found_and_timed() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([m.odd(x), m.even(x)], 1)

    model = Model(forward, odd=nn.Conv2d(16, 20, 3), even=nn.Conv2d(16, 24, 3)).cuda()
    program = module_of(model, torch.randn(1, 16, 32, 32, device="cuda"), passes=()).program
    with torch.no_grad():
        found = measure_lane(program)
    (odd,) = found["padded"]
    assert set(odd["ms"]) == {"as it is", "+0 +4"}
    assert found["concatenations"] == 1
    assert 0.0 < found["concatenation_ms"] < found["ms"]


@pytest.mark.gpu
def test_a_network_is_measured_in_both_lanes() -> None:
    with torch.no_grad():
        lanes = measure_network("conv3x64", torch.device("cuda", 0))["lanes"]
    assert set(lanes) == {"fp32", "amp"}
    assert all(lane["ms"] > 0.0 and lane["concatenations"] == 0 for lane in lanes.values())
