"""A program: its border converts, its world is its lane's, and it never changes itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.lanes import FP32
from ampopt.ir.program import Border, Program
from ampopt.ir.settings import autocast_now
from tests.helpers import BF16, program_of

CPU = torch.device("cpu")
X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def linear() -> Program:
    return program_of(nn.Linear(4, 4).eval(), X)


@pytest.mark.parametrize(
    ("tensor", "border", "strides"),
    [
        (X, Border(torch.float32), (48, 16, 4, 1)),
        (X.permute(1, 0, 3, 2), Border(torch.float32), (32, 16, 4, 1)),
        (X, Border(torch.float16, torch.channels_last), (48, 1, 12, 3)),
        (X[0], Border(torch.float64, torch.channels_last), (16, 4, 1)),
        (X[None], Border(torch.float32, torch.channels_last_3d), (96, 1, 32, 8, 2)),
    ],
)
def test_a_border_converts_dtype_and_memory_format(
    tensor: Tensor, border: Border, strides: tuple[int, ...]
) -> None:
    crossed = border.convert(tensor)
    assert (crossed.dtype, crossed.stride()) == (border.dtype, strides)
    assert torch.equal(crossed, tensor.to(border.dtype))


def test_what_is_as_the_border_says_crosses_as_it_is() -> None:
    assert Border(torch.float32).convert(X) is X


@pytest.mark.parametrize("tensor", [torch._neg_view(X), torch.complex(X, X).conj()])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_bits_that_memory_does_not_hold_stop_at_the_border(
    tensor: Tensor, memory_format: torch.memory_format
) -> None:
    crossed = Border(tensor.dtype, memory_format).convert(tensor)
    assert not crossed.is_neg()
    assert not crossed.is_conj()
    assert torch.equal(crossed, tensor)


def test_it_runs_under_autocast_until_its_casts_are_written_down() -> None:
    seen: list[torch.dtype | None] = []

    def look(*tensors: Tensor) -> tuple[Tensor, ...]:
        seen.append(autocast_now(CPU))
        return tensors

    program = linear().replace(engine=look)
    for each in (program, BF16.start(program), BF16.start(program).replace(under_autocast=False)):
        each.replace(engine=look).run(X)
    assert seen == [None, torch.bfloat16, None]


def test_a_lane_starts_a_program_anew() -> None:
    program = linear()
    changed = program.replace(settings=dataclasses.replace(program.settings, tf32=True))
    started = BF16.start(changed)
    assert (started.lane, started.under_autocast, started.settings.tf32) == (BF16, True, False)
    assert started.graph is program.graph
    again = FP32.start(started)
    assert (again.lane, again.under_autocast) == (FP32, False)


def test_another_graph_drops_the_engine_and_leaves_the_program_as_it_was() -> None:
    program = linear().replace(engine=lambda x: (x,))
    other = program.with_graph(linear().graph)
    assert other.engine is None
    assert other.function is other.graph
    assert program.function is program.engine is not None


def test_results_cross_the_border_as_the_caller_is_promised() -> None:
    program = linear()
    half = program.replace(exit=(Border(torch.float16),))
    assert half.run(X)[0].dtype is torch.float16
    assert torch.equal(half.run(X)[0], program.run(X)[0].half())


def test_as_many_tensors_as_inputs_are_taken() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        linear().run(X, X)


def test_a_volume_of_one_channel_has_plain_strides_whatever_its_caller_gives_it() -> None:
    volume = torch.randn(2, 1, 1, 4, 4).to(memory_format=torch.channels_last_3d)
    assert volume.stride() == (16, 1, 16, 4, 1)
    entered = Border(torch.float32).convert(volume)
    assert entered.stride() == (16, 16, 16, 4, 1)
    assert entered.data_ptr() == volume.data_ptr()
    assert torch.equal(entered, volume)
    assert Border(torch.float32).convert(entered) is entered
