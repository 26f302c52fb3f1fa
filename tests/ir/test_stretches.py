"""Stretches in higher precision: from what overflows to where the values are in range again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampopt.ir.baking import bake
from ampopt.ir.beside import observe
from ampopt.ir.stretches import Stretches, in_range, stretches
from tests.helpers import FP16, program_of


def found(gain: float, *after: nn.Module, kept: tuple[str, ...] = ()) -> Stretches:
    """The stretches of `linear -> after` whose first results are about as large as `gain`."""
    torch.manual_seed(0)
    first = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.eye(8) * gain)
    x = torch.ones(2, 8)
    program = program_of(nn.Sequential(first, *after).eval(), x, lane=FP16)
    seen = observe(bake(program, "amp")[0], [(x,)])
    return stretches(program.graph, seen, torch.float16, "amp", kept)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_in_range_has_headroom() -> None:
    assert in_range(32_000.0, torch.float16)
    assert not in_range(33_000.0, torch.float16)
    assert in_range(1e30, torch.bfloat16)


@pytest.mark.parametrize("gain", [1.0, 32_000.0])
def test_what_is_in_range_stays_low(gain: float) -> None:
    assert found(gain, nn.ReLU()) == Stretches((), (), frozenset())


def test_what_follows_stays_until_it_is_in_range_again() -> None:
    """ReLU and dropout follow; the product brings the values back; what comes after is low again."""
    assert found(1e6, nn.ReLU(), Times(1e-4), nn.ReLU(), nn.Linear(8, 8)) == Stretches(
        ("linear",), (), frozenset({"mul"})
    )


def test_a_product_that_reads_what_is_out_of_range_stays_too() -> None:
    assert found(1e6, nn.ReLU(), nn.Linear(8, 8)).for_range == ("linear", "linear_1")


def test_an_output_is_not_cast_to_and_fro() -> None:
    assert found(1e6, Times(1e-4)) == Stretches(("linear",), (), frozenset())


def test_what_is_kept_for_its_precision_is_not_cast_back_and_keeps_what_follows() -> None:
    result = found(1.0, nn.Sigmoid(), nn.ReLU(), kept=("linear", "sigmoid"))
    assert result == Stretches((), ("linear",), frozenset())
