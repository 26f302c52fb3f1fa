"""Branches: the plan is as good as intended, and safe on random graphs; a planted mistake is a race."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import getitem

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from ampopt.engines.branches import Schedule, branched, plan
from ampopt.ir.graph import aten, calls
from tests.helpers import Model, program_of
from tests.simulated_streams import run_simulated

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def _graph_of(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return program_of(model, *(inputs or (X,))).graph


def _text_of(schedule: Schedule) -> str:
    """A call a line: `2 add <- relu`: on stream 2, after it has waited for relu."""
    lines = []
    for node, stream in schedule.stream.items():
        awaited = " ".join(source.name for source in schedule.waits.get(node, ()))
        lines.append(f"{stream} {node.name}" + (f" <- {awaited}" if awaited else ""))
    return "\n".join(lines)


def _plan_of(model: nn.Module, *inputs: Tensor, streams: int = 4) -> str:
    return _text_of(plan(_graph_of(model, *inputs).graph, streams))


def test_a_chain_stays_on_the_main_stream() -> None:
    assert (
        _plan_of(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten())) == "0 conv2d\n0 relu\n0 flatten"
    )


def test_the_branches_of_a_block_run_side_by_side_and_the_longest_goes_on() -> None:
    model = Model(lambda m, x: torch.cat([(y := x.relu()).tanh(), y.exp().sin(), y.cos().abs().neg()], 1))
    assert _plan_of(model).splitlines() == [
        "0 relu",
        "0 tanh",
        "1 exp <- relu",
        "1 sin",
        "2 cos <- relu",
        "2 abs_1",
        "2 neg",
        "2 cat <- sin tanh",
    ]


def test_a_second_block_uses_the_streams_of_the_first() -> None:
    model = Model(lambda m, x: (y := x.tanh() + x.exp()).cos() + y.sin())
    text = _plan_of(model)
    assert text == "0 tanh\n1 exp\n0 add <- exp\n0 cos\n1 sin <- add\n0 add_1 <- sin"


def test_no_more_streams_are_taken_than_allowed() -> None:
    model = Model(lambda m, x: [x.relu(), x.tanh(), x.exp(), x.sin(), x.cos(), x.neg()])
    graph = _graph_of(model).graph
    assert [plan(graph, streams).streams for streams in (1, 2, 4, 9)] == [1, 2, 4, 6]


def test_an_event_that_stands_for_another_is_the_only_one_awaited() -> None:
    """`mul` waits for `sin`, which comes after `tanh` on the same stream."""
    model = Model(lambda m, x: [(a := x.exp()), (b := x.tanh()), (c := b.sin()), a.cos() * c + b])
    assert _plan_of(model).endswith("0 cos\n0 mul <- sin\n0 add")


def test_a_view_stays_with_what_it_views_and_its_reader_waits_for_that() -> None:
    model = Model(lambda m, x: [x.tanh(), *((y := x.exp()).neg(), y.transpose(1, 2).cos())])
    text = _plan_of(model)
    assert text == "0 tanh\n1 exp\n1 neg\n1 transpose\n2 cos <- exp"


def test_what_is_read_on_another_stream_is_held_until_the_join() -> None:
    model = Model(lambda m, x: (y := x.relu()).tanh().neg() + y.exp().sin())
    schedule = plan(_graph_of(model).graph, 4)
    assert [node.name for node in schedule.held] == ["relu", "sin"]


def test_the_written_graph_forks_switches_waits_and_joins() -> None:
    module = _graph_of(Model(lambda m, x: (y := x.relu()).tanh() + y.exp()))
    written = branched(module, plan(module.graph, 4))
    lines = [line.strip().partition(";")[0] for line in written.code.splitlines() if " = " in line]
    assert lines == [
        "fork = streams.fork(2)",
        "relu = torch.ops.aten.relu.default(inputs_0)",
        "record = streams.record()",
        "tanh = torch.ops.aten.tanh.default(relu)",
        "launch_on = streams.launch_on(1)",
        "wait = streams.wait(record)",
        "exp = torch.ops.aten.exp.default(relu)",
        "record_1 = streams.record()",
        "launch_on_1 = streams.launch_on(0)",
        "wait_1 = streams.wait(record_1)",
        "add = torch.ops.aten.add.Tensor(tanh, exp)",
        "join = streams.join([relu, exp], [add])",
    ]


_ONE: dict[str, Callable[[fx.Graph, fx.Node], fx.Node]] = {
    "neg": lambda g, x: g.call_function(aten.neg.default, (x,)),
    "relu": lambda g, x: g.call_function(aten.relu.default, (x,)),
    "view": lambda g, x: g.call_function(aten.transpose.int, (x, 0, 1)),
    "view or copy": lambda g, x: g.call_function(aten.reshape.default, (x, [4, 4])),
    "itself or copy": lambda g, x: g.call_function(aten.contiguous.default, (x,)),
    "itself": lambda g, x: g.call_function(aten.dropout.default, (x, 0.5, False)),
    "several views": lambda g, x: _swapped(g, g.call_function(aten.split.Tensor, (x, 2))),
    "several views, composed": lambda g, x: _swapped(g, g.call_function(aten.chunk.default, (x, 2))),
    "several results": lambda g, x: g.call_function(getitem, (g.call_function(aten.sort.default, (x,)), 0)),
}
_TWO = (aten.add.Tensor, aten.maximum.default)


def _swapped(graph: fx.Graph, halves: fx.Node) -> fx.Node:
    first, second = (graph.call_function(getitem, (halves, index)) for index in (0, 1))
    return graph.call_function(aten.cat.default, ([second, first],))


_CERTAIN = ("neg", "relu", "view", "several views", "several results")
"""Those that surely launch something, or surely nothing."""


@st.composite
def _graphs(draw: st.DrawFn, kinds: Sequence[str] = tuple(_ONE)) -> fx.GraphModule:
    """A graph on two inputs and a weight, all 4x4; what nothing reads is returned."""
    root, graph = nn.Module(), fx.Graph()
    root.register_buffer("weight", torch.linspace(-2, 2, 16).reshape(4, 4))
    values = [graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("weight")]
    for _ in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from(["two", *kinds]))
        near = values[-draw(st.integers(1, len(values)))]
        if kind == "two":
            arguments = (near, draw(st.sampled_from(values)))
            values.append(graph.call_function(draw(st.sampled_from(_TWO)), arguments))
        else:
            values.append(_ONE[kind](graph, near))
    last = [value for value in values[3:] if not value.users]
    extra = draw(st.lists(st.sampled_from(values[3:]), max_size=2))
    results = dict.fromkeys([*last, *extra])
    graph.output(tuple(graph.call_function(aten.clone.default, (value,)) for value in results))
    return fx.GraphModule(root, graph)


INPUTS = tuple(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
STREAMS = st.integers(1, 5)


@settings(max_examples=300, deadline=None)
@given(_graphs(), STREAMS)
def test_on_random_graphs_nothing_races_and_the_results_are_the_graphs(
    module: fx.GraphModule, streams: int
) -> None:
    schedule = plan(module.graph, streams)
    outputs, races = run_simulated(branched(module, schedule), *INPUTS)
    assert races == []
    assert schedule.streams <= streams
    for output, expected in zip(outputs, module(*INPUTS), strict=True):
        assert torch.equal(output, expected)


@settings(max_examples=200, deadline=None)
@given(_graphs(_CERTAIN), STREAMS, st.data())
def test_on_random_graphs_no_wait_can_be_left_out(
    module: fx.GraphModule, streams: int, data: st.DataObject
) -> None:
    """But for operators that may return a view: where they do, they launch nothing to be waited for."""
    schedule = plan(module.graph, streams)
    waits = [(node, source) for node, sources in schedule.waits.items() for source in sources]
    if waits:
        node, source = data.draw(st.sampled_from(waits))
        fewer = {**schedule.waits, node: tuple(s for s in schedule.waits[node] if s is not source)}
        wrong = branched(module, dataclasses.replace(schedule, waits=fewer))
        assert run_simulated(wrong, *INPUTS)[1], f"{node.name} does not need to wait for {source.name}"


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda x: x, id="itself"),
        pytest.param(lambda x: x.transpose(2, 3), id="a view of it"),
        pytest.param(lambda x: F.dropout(x, 0.5, False), id="it from an operator that returns its argument"),
    ],
)
def test_memory_that_is_not_held_is_a_race(read: object) -> None:
    """Stream 1 still reads `relu` when `sin` could get its memory on stream 0."""
    assert callable(read)
    model = Model(lambda m, x: [(y := x.relu()).tanh(), read(y).exp(), x.sin()])
    module = _graph_of(model)
    schedule = plan(module.graph, 4)
    assert schedule.held
    assert run_simulated(branched(module, schedule), X)[1] == []
    wrong = branched(module, dataclasses.replace(schedule, held=()))
    assert run_simulated(wrong, X)[1] == ["memory of 0 is free while 1 uses it"]


def test_a_graph_without_calls_is_written_too() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    module = fx.GraphModule(nn.Module(), graph)
    assert run_simulated(branched(module, plan(graph, 4)), X)[0] == [X]
    assert list(calls(module)) == []
