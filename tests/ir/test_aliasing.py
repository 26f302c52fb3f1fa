"""What a call writes to and what its result aliases is read from schemas, and assumed where unknown."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from ampopt.ir.aliasing import aliased_by, is_returned, never_written, overlapping_write, sharing, written_by

aten = torch.ops.aten


def foreign(*args: Any) -> Any:
    """A function of which nothing is known."""
    return args


def inputs(count: int) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    return graph, [graph.placeholder(f"x{i}") for i in range(count)]


def test_a_call_writes_to_the_arguments_that_its_schema_marks() -> None:
    graph, (a, b, c) = inputs(3)
    assert written_by(graph.call_function(aten.add_.Tensor, (a, b))) == [a]
    assert written_by(graph.call_function(aten.add.out, (a, b), {"out": c})) == [c]
    assert written_by(graph.call_function(aten._foreach_add_.Scalar, ([a, c], 1.0))) == [a, c]
    for target in (aten.add.Tensor, aten.view_as.default, foreign):
        assert written_by(graph.call_function(target, (a, b))) == []
    assert written_by(a) == []


def test_a_result_aliases_what_the_schema_says_and_everything_where_it_says_nothing() -> None:
    graph, (a, b) = inputs(2)
    assert aliased_by(graph.call_function(aten.add.Tensor, (a, b))) == []
    assert aliased_by(graph.call_function(aten.linear.default, (a, b))) == []
    assert aliased_by(graph.call_function(aten.add_.Tensor, (a, b))) == [a]
    assert aliased_by(graph.call_function(aten.select.int, (a, 0, 0))) == [a]
    assert aliased_by(graph.call_function(aten.dropout.default, (a, 0.5, False))) == [a]
    assert aliased_by(graph.call_function(foreign, (a, [b]))) == [a, b]
    chunks = graph.call_function(aten.chunk.default, (b, 2))
    assert aliased_by(chunks) == [b]
    assert aliased_by(graph.call_function(operator.getitem, (chunks, 0))) == [chunks]
    assert aliased_by(a) == []


def test_views_share_memory_and_what_is_apart_does_not() -> None:
    graph, (a, _) = inputs(2)
    copy = graph.call_function(aten.to.dtype, (a, torch.float32, False, True))
    first, second = (graph.call_function(aten.select.int, (node, 0, 0)) for node in (a, copy))
    total = graph.call_function(aten.add.Tensor, (first, second))
    assert sharing(first, lambda node: False) == {a, copy, first, second}
    assert sharing(first, lambda node: node is copy) == {a, first}
    assert sharing(copy, lambda node: node is copy) == {copy, second}
    graph.output((second, total))  # which are still no views of each other
    assert sharing(second, lambda node: node is copy) == {copy, second}
    assert [is_returned([node]) for node in (first, second, total)] == [False, True, True]


@pytest.mark.parametrize(("target", "writes"), [(aten.relu_.default, True), (aten.relu.default, False)])
@pytest.mark.parametrize("nested", [False, True])
def test_a_block_that_writes_somewhere_inside_may_write_to_all_its_arguments(
    target: Callable[..., Any], writes: bool, nested: bool
) -> None:
    inner = fx.Graph()
    inner.output(inner.call_function(target, (inner.placeholder("x"),)))
    block = fx.GraphModule(nn.Module(), inner)
    if nested:
        outer = fx.Graph()
        outer.output(outer.call_module("inside", (outer.placeholder("x"),)))
        block = fx.GraphModule({"inside": block}, outer)
    graph = fx.Graph()
    x, attribute = graph.placeholder("x"), graph.get_attr("block")
    graph.output(graph.call_function(foreign, (attribute, x)))
    module = fx.GraphModule({"block": block}, graph)
    (call,) = module.graph.find_nodes(op="call_function", target=foreign)
    assert written_by(call) == (call.all_input_nodes if writes else [])
    assert len(call.all_input_nodes) == 2


def test_a_write_reaches_every_name_of_the_memory_before_and_after_it() -> None:
    graph, (a, b) = inputs(2)
    before = graph.call_function(aten.view.default, (a, [-1]))
    part = graph.call_function(aten.select.int, (before, 0, 0))
    write = graph.call_function(aten.add_.Tensor, (part, b))
    after = graph.call_function(aten.view.default, (a, [-1]))
    fresh = graph.call_function(aten.neg.default, (after,))
    view_of_fresh = graph.call_function(aten.view.default, (fresh, [-1]))
    assert never_written(graph) == {b, fresh, view_of_fresh}
    assert {a, before, part, write, after}.isdisjoint(never_written(graph))


def test_a_write_reaches_all_the_families_that_an_unknown_call_has_joined() -> None:
    graph, (a, b, c) = inputs(3)
    view = graph.call_function(aten.view.default, (a, [-1]))
    joined = graph.call_function(foreign, (view, b))
    graph.call_function(aten.zero_.default, (joined,))
    assert never_written(graph) == {c}


def test_nothing_is_written_in_a_graph_without_writes() -> None:
    graph, (a, b) = inputs(2)
    graph.call_function(aten.add.Tensor, (graph.call_function(aten.view.default, (a, [-1])), b))
    assert never_written(graph) == set(graph.nodes)


OVERLAPPING: dict[str, Tensor] = {
    "broadcast": torch.zeros(3, 1).expand(3, 4),
    "sliding windows": torch.arange(6).unfold(0, 3, 1),
    "equal strides": torch.zeros(9).as_strided((3, 3), (1, 1)),
}
SEPARATE: dict[str, Tensor] = {
    "dense": torch.zeros(2, 3, 4),
    "permuted": torch.zeros(2, 3, 4).permute(2, 0, 1),
    "with gaps": torch.zeros(8, 8)[::2, ::3],
    "disjoint windows": torch.arange(6).unfold(0, 3, 3),
    "one element wide": torch.zeros(3).as_strided((3, 1), (1, 0)),
    "none at all, and repeated": torch.zeros(0, 1).expand(0, 4),
    "none at all": torch.zeros(9).as_strided((0, 3, 3), (0, 1, 1)),
    "sparse": torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize(
    ("value", "overlaps"),
    [*((value, True) for value in OVERLAPPING.values()), *((value, False) for value in SEPARATE.values())],
    ids=[*OVERLAPPING, *SEPARATE],
)
def test_a_write_to_a_tensor_whose_elements_share_memory_is_found(value: Tensor, overlaps: bool) -> None:
    graph, (x,) = inputs(1)
    x.meta["val"] = value
    write = graph.call_function(aten.zero_.default, (x,))
    assert overlapping_write(graph.nodes) is (write if overlaps else None)


def test_a_write_to_a_part_of_an_overlapping_tensor_is_the_first_that_is_found() -> None:
    graph, (x, y) = inputs(2)
    x.meta["val"], y.meta["val"] = torch.zeros(1).expand(4), torch.zeros(4)
    graph.call_function(aten.zero_.default, (y,))
    part = graph.call_function(aten.select.int, (x, 0, 0))
    part.meta["val"] = torch.zeros(())
    write = graph.call_function(aten.zero_.default, (part,))
    graph.call_function(aten.zero_.default, (x,))
    assert overlapping_write(graph.nodes) is write


def test_reading_an_overlapping_tensor_is_no_write_to_it() -> None:
    graph, (x,) = inputs(1)
    x.meta["val"] = torch.zeros(1).expand(4)
    fresh = graph.call_function(aten.neg.default, (x,))
    graph.call_function(aten.zero_.default, (fresh,))
    assert overlapping_write(graph.nodes) is None
