"""Shapes of a program's tensors: recorded in a run, or told without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ampopt.ir.graph import aten, calls, dtype_of, shape_of, tensor_meta
from ampopt.ir.program import Program
from ampopt.ir.shapes import Foretold, expected_shapes, record_shapes
from ampopt.ir.transform import Pass
from ampopt.passes import ChannelsLast
from tests.helpers import Model, program_of


def test_recorded_shapes_are_of_a_copy_and_of_single_tensors_only() -> None:
    model = Model(lambda m, x: (torch.max_pool2d(x.double(), 2).flatten(1), *x.aminmax(dim=1)))
    program = program_of(model, torch.randn(2, 3, 4, 4))
    module = record_shapes(program)
    flat, pair = next(calls(module, [aten.flatten.using_ints])), next(calls(module, [aten.aminmax.default]))
    assert (shape_of(flat), dtype_of(flat)) == ((2, 12), torch.float64)
    assert all("tensor_meta" not in node.meta for node in program.graph.graph.nodes)
    with pytest.raises(TypeError, match="aminmax has no single output tensor"):
        tensor_meta(pair)


@pytest.mark.parametrize("above", [(), (ChannelsLast(),)], ids=["", "channels_last"])
def test_shapes_that_are_expected_are_those_of_a_run(above: tuple[Pass, ...]) -> None:
    convs = {"a": nn.Conv2d(3, 8, 3, 2, 1), "b": nn.Conv2d(8, 8, 5, padding=2, groups=8)}

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.b(m.a(x).relu())
        return torch.cat([y, y.mean((2, 3), keepdim=True) * y], 1)[:, 2:], y.flatten(2).transpose(1, 2) @ m.w

    model = Model(forward, **convs, w=torch.ones(8, 4))
    program = program_of(model, torch.randn(2, 3, 12, 10), on_top_of=above)
    expected, recorded = expected_shapes(program), record_shapes(program)
    found, real = (
        {node.name: tensor_meta(node) for node in calls(module)} for module in (expected, recorded)
    )
    assert found == real
    assert len(real) > 8


def with_call_of(function: Callable[[Tensor], Tensor]) -> Program:
    """`relu`, then the function, which the graph calls as it is."""
    program = program_of(Model(lambda m, x: x.relu() * 2), torch.ones(5, 5))
    node = next(calls(program.graph, [aten.mul.Tensor]))
    node.target, node.args = function, node.args[:1]
    return program


def test_foretold_shapes_need_no_run_and_come_true() -> None:
    runs: list[bool] = []

    def noted(x: Tensor) -> Tensor:
        runs.append(not isinstance(x, FakeTensor))
        return x[:3].half()

    program, foretold = with_call_of(noted), Foretold()
    with foretold.telling():
        module = record_shapes(program)
    assert runs == [False]
    node = next(calls(module, [noted]))
    assert (shape_of(node), dtype_of(node)) == ((3, 5), torch.float16)
    assert foretold.came_true()
    assert foretold.came_true()  # what came true is not run again
    record_shapes(program)  # after the block they are recorded
    assert runs == [False, True, True]


def test_strides_that_a_run_gives_otherwise_are_noticed() -> None:
    program, foretold = with_call_of(lambda x: x * 2 if isinstance(x, FakeTensor) else (x * 2).T), Foretold()
    with foretold.telling():
        record_shapes(program)
    assert not foretold.came_true()
    assert not foretold.came_true()


def by_value(x: Tensor) -> Tensor:
    return x[: int(x[0].sum()) - 2]


def test_shapes_that_depend_on_values_are_recorded() -> None:
    program, foretold = with_call_of(by_value), Foretold()
    found = expected_shapes(program)
    with foretold.telling():
        told = record_shapes(program)
    for module in (found, told):
        assert shape_of(next(calls(module, [by_value]))) == (3, 5)
    assert foretold.came_true()
