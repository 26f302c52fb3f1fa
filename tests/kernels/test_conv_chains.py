"""Chains of operators around a convolution: how wide they are computed, and what cannot be addressed."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from ampopt.ir.graph import aten, calls
from ampopt.ir.shapes import record_shapes
from ampopt.kernels.conv_chains import find_chains, merge_factor
from ampopt.passes import ChannelsLast
from tests.helpers import Model, program_of

NHWC = [ChannelsLast()]


def test_neighbouring_groups_are_computed_together() -> None:
    program = program_of(nn.Conv2d(16, 16, 3, padding=1, groups=4), torch.randn(2, 16, 8, 8), on_top_of=NHWC)
    (chain,), _ = find_chains(record_shapes(program), program.settings.tf32)
    assert (chain.site.groups, chain.site.weight_shape) == (1, (16, 16, 3, 3))


@pytest.mark.parametrize(
    ("weight", "groups", "expected"),
    [
        ((64, 4, 3, 3), 16, 4),
        ((64, 16, 3, 3), 4, 1),
        ((16, 1, 3, 3), 16, 1),
        ((32, 1, 3, 3), 16, 16),
        ((3, 2, 3, 3), 3, 1),
        ((12, 2, 3, 3), 6, 2),
    ],
)
def test_groups_are_merged_up_to_a_tensor_cores_width(
    weight: tuple[int, ...], groups: int, expected: int
) -> None:
    assert merge_factor(weight, groups) == expected


def test_it_declines_what_32_bits_cannot_address() -> None:
    module = record_shapes(
        program_of(
            Model(lambda m, x: m.p(torch.cat([x, x], 1)[:, :16]), p=nn.Conv2d(16, 16, 1)),
            torch.randn(2, 16, 8, 8),
            on_top_of=NHWC,
        )
    )
    conv = next(calls(module, [aten.conv2d.default]))
    side, pixel = 2**12, 2**7
    # 2^28 elements that are read, in a tensor of 2^31
    strides = {"slice_1": (side * side * pixel, 1, side * pixel, pixel)}
    for node in (conv, conv.args[0]):
        assert isinstance(node, fx.Node)
        meta = node.meta["tensor_meta"]
        dense = (16 * side * side, 1, 16 * side, 16)
        stride = dense if node is conv else strides["slice_1"]
        node.meta["tensor_meta"] = meta._replace(shape=torch.Size((1, 16, side, side)), stride=stride)
    assert [declined.reason for declined in find_chains(module, False)[1]] == [
        "its offsets do not fit into 32 bits"
    ]
