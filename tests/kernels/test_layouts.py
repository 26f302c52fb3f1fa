"""Convolution weights and images with the channel innermost; what cannot be laid out is declined or left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.program import CHANNELS_LAST, Border
from ampopt.ir.transform import Result
from ampopt.kernels.layouts import in_channels_last
from tests.helpers import Model, check_graph, program_of, targets_of

IMAGE = torch.randn(1, 3, 8, 9)


def formats(result: Result) -> list[torch.memory_format]:
    return [border.memory_format for border in result.program.entry]


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(3, 4, 3), (1, 3, 8, 9)),
        (nn.ConvTranspose2d(3, 4, 2), (1, 3, 8, 9)),
        (nn.Conv3d(3, 4, 2), (1, 3, 4, 5, 6)),
        (nn.ConvTranspose3d(3, 4, 2), (1, 3, 4, 5, 6)),
    ],
    ids=["2d", "transposed 2d", "3d", "transposed 3d"],
)
def test_weight_and_input_get_the_format_of_their_rank(layer: nn.Module, size: tuple[int, ...]) -> None:
    x = torch.randn(size)
    program = program_of(layer, x)
    result = in_channels_last(program)
    assert result.rewrites == 1
    assert formats(result) == [CHANNELS_LAST[x.dim()]]
    (weight,) = [t for t in result.program.graph.buffers() if t.dim() == x.dim()]
    assert weight.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])
    check_graph(result.program)
    assert targets_of(result.program) == targets_of(program)
    assert torch.allclose(result.program.run(x)[0], program.run(x)[0], atol=1e-6)


def test_the_given_program_keeps_its_weights_and_its_border() -> None:
    program = program_of(nn.Conv2d(3, 4, 3), IMAGE)
    before = {name: (t.clone(), t.stride()) for name, t in program.graph.named_buffers()}
    in_channels_last(program)
    assert program.entry == (Border(torch.float32),)
    for name, tensor in program.graph.named_buffers():
        assert torch.equal(tensor, before[name][0])
        assert tensor.stride() == before[name][1]


def test_a_second_time_there_is_nothing_to_do() -> None:
    once = in_channels_last(program_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)), IMAGE))
    assert once.rewrites == 2
    again = in_channels_last(once.program)
    assert (again.rewrites, again.program) == (0, once.program)


def test_only_images_of_the_convolutions_rank_are_laid_out() -> None:
    model = Model(lambda m, x, rows, volume: (m.conv(x), rows + 1, volume + 1), conv=nn.Conv2d(3, 4, 3))
    result = in_channels_last(program_of(model, IMAGE, torch.ones(2, 3), torch.ones(1, 2, 3, 4, 5)))
    plain = torch.contiguous_format
    assert formats(result) == [torch.channels_last, plain, plain]


def test_a_computed_weight_is_declined_and_the_others_are_laid_out() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        return F.conv2d(m.conv(x), m.weight.sigmoid())  # type: ignore[operator]

    model = Model(forward, conv=nn.Conv2d(3, 4, 3), weight=torch.randn(2, 4, 1, 1))
    result = in_channels_last(program_of(model, IMAGE))
    assert result.rewrites == 1
    assert [(d.node, d.reason) for d in result.declined] == [("conv2d_1", "its weight is computed")]


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Conv1d(3, 4, 3), torch.randn(1, 3, 8)),
        (nn.Linear(8, 4), torch.randn(2, 8)),
        (nn.ReLU(), IMAGE),
    ],
    ids=["1d", "linear", "none"],
)
def test_where_there_is_no_such_convolution_the_program_is_the_same(model: nn.Module, x: Tensor) -> None:
    program = program_of(model, x)
    result = in_channels_last(program)
    assert result.program is program
    assert (result.rewrites, result.declined) == (0, ())
