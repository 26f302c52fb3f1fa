"""A graph as lines: each call with its arguments and its place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampopt.ir.graph_listing import LONGEST, listed
from tests.helpers import Model, program_of


def test_each_call_is_a_line_with_its_place_and_weights_are_arguments() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    lines = listed(program_of(model, torch.randn(1, 3, 8, 8)).graph)
    assert lines[0] == "input = input" or lines[0].endswith(" = input")
    assert lines[1].startswith("conv2d = conv2d(")
    assert "weight" in lines[1]
    assert lines[1].endswith("  # 0")
    assert lines[2] == "relu = relu(conv2d)  # 1"
    assert lines[3] == "return [relu]"
    assert len(lines) == 4  # weights have no lines of their own


def test_long_calls_are_shortened() -> None:
    def many(_: Model, x: Tensor) -> Tensor:
        return torch.cat([x * k for k in range(40)])

    lines = listed(program_of(Model(many).eval(), torch.ones(1)).graph)
    joined = next(line for line in lines if line.startswith("cat"))
    assert " …" in joined
    assert len(joined.partition("  # ")[0]) <= LONGEST
