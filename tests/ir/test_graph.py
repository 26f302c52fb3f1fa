"""The graph helpers read and edit an ATen graph without touching the original or losing what is read."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from ampopt.ir.graph import (
    add_constant,
    add_rounded,
    arguments,
    aten,
    calls,
    cast_for_readers,
    constant,
    constant_outputs,
    copy_of,
    draws_random_numbers,
    exact_constant,
    finish,
    forget_unrounded,
    gives_a_number,
    insert_call,
    is_constant,
    is_native,
    is_opaque,
    makes_fresh_tensor,
    only_user,
    own_outputs,
    reads_result,
    reads_strides,
    replace,
    where,
)
from ampopt.ir.origin import Origin
from ampopt.ir.pool_indices import pooling_operators

X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
HERE = Origin("layer.act", "net.py:22")


def graph_of(build: Callable[[fx.Graph, fx.Node], Any], **weights: Tensor) -> fx.GraphModule:
    """The graph of one input whose output is the nodes that `build` gives."""
    graph = fx.Graph()
    built = build(graph, graph.placeholder("x"))
    graph.output(built if isinstance(built, tuple) else (built,))
    return fx.GraphModule(weights, graph)


def node_of(module: fx.GraphModule, target: object) -> fx.Node:
    (node,) = calls(module, [target])
    return node


def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A call with one input `x` in front of the given arguments."""
    module = graph_of(lambda g, x: g.call_function(target, (x, *args), kwargs))
    return node_of(module, target)


def test_a_copy_is_edited_alone_and_shares_its_weights() -> None:
    module = graph_of(lambda g, x: g.call_function(aten.mul.Tensor, (x, g.get_attr("w"))), w=torch.ones(4))
    code = module.code
    copied = copy_of(module)
    node = node_of(copied, aten.mul.Tensor)
    replace(node, insert_call(copied, node, aten.add.Tensor, *node.args))
    finish(copied)
    assert module.code == code
    assert copied.w is module.w
    assert torch.equal(copied(X)[0], X + 1)
    assert torch.equal(module(X)[0], X)


def test_finish_removes_dead_calls_and_the_weights_that_only_they_read() -> None:
    def build(g: fx.Graph, x: fx.Node) -> fx.Node:
        g.call_function(aten.mul.Tensor, (x, g.get_attr("dead")))
        return g.call_function(aten.add.Tensor, (x, g.get_attr("read")))

    module = finish(graph_of(build, dead=torch.ones(1), read=torch.ones(1)))
    assert [node.target for node in calls(module)] == [aten.add.Tensor]
    assert [name for name, _ in module.named_buffers()] == ["read"]
    assert "mul" not in module.code


def test_calls_gives_only_the_wanted_ones_in_order_while_they_are_replaced() -> None:
    def build(g: fx.Graph, x: fx.Node) -> fx.Node:
        y = g.call_function(aten.neg.default, (x,))
        return g.call_function(aten.neg.default, (g.call_function(aten.abs.default, (y,)),))

    module = graph_of(build)
    targets = [aten.neg.default, aten.abs.default, aten.neg.default]
    assert [node.target for node in calls(module)] == targets
    for node in calls(module, [aten.neg.default]):
        replace(node, insert_call(module, node, aten.relu.default, *node.args))
    assert [node.target for node in calls(module)] == [
        aten.relu.default,
        aten.abs.default,
        aten.relu.default,
    ]
    module.graph.lint()


def test_arguments_have_schema_names_and_defaults_for_what_was_not_given() -> None:
    node = call(aten.add.Tensor, 3)
    assert arguments(node) == {"self": node.args[0], "other": 3, "alpha": 1}
    assert arguments(call(aten.add.Tensor, 3, alpha=2))["alpha"] == 2
    assert arguments(call(aten.max_pool2d_with_indices.default, [2, 2]))["stride"] == []
    with pytest.raises(TypeError, match="does not call an operator"):
        arguments(call(operator.getitem, 0))


def test_a_constant_is_read_through_its_node_and_anything_computed_is_refused() -> None:
    module = graph_of(lambda g, x: g.call_function(aten.mul.Tensor, (x, g.get_attr("w"))), w=torch.ones(2))
    node = node_of(module, aten.mul.Tensor)
    x, w = node.args
    assert constant(module, w) is module.w
    assert constant(module, None) is None
    assert exact_constant(module, None) is None
    assert [is_constant(value) for value in (w, x, 2.0, None)] == [True, False, False, False]
    for computed in (x, node, 2.0):
        with pytest.raises(TypeError, match="is not a constant of the graph"):
            constant(module, computed)
    module.__dict__["number"] = 3
    with pytest.raises(TypeError, match="constant number is not a tensor"):
        constant(module, module.graph.create_node("get_attr", "number"))


def test_new_constants_never_take_a_name_that_is_taken() -> None:
    module = graph_of(
        lambda g, x: g.call_function(aten.neg.default, (g.get_attr("a_b"),)), a_b=torch.zeros(1)
    )
    node = node_of(module, aten.neg.default)
    first, second = (add_constant(module, "a.b", torch.full((1,), float(i)), node) for i in (1, 2))
    assert [first.target, second.target] == ["a_b_1", "a_b_2"]
    assert [float(value) for _, value in module.named_buffers()] == [0, 1, 2]
    parameter = nn.Parameter(torch.ones(1))
    assert not getattr(module, str(add_constant(module, "p", parameter, node).target)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_arithmetic_on_a_rounded_weight_starts_from_what_it_was_until_it_is_forgotten(
    dtype: torch.dtype,
) -> None:
    module = graph_of(lambda g, x: g.call_function(aten.neg.default, (x,)))
    weight = torch.tensor([1 / 3])
    node = add_rounded(module, "w", weight, dtype, node_of(module, aten.neg.default))
    stored, exact = constant(module, node), exact_constant(module, node)
    assert stored is not None
    assert exact is not None
    assert stored.dtype is dtype
    assert torch.equal(stored, weight.to(dtype))
    assert torch.equal(exact, weight)
    assert ("exact" in node.meta) is (dtype is not torch.float32)
    erased = add_rounded(module, "erased", weight, dtype, node)
    module.graph.erase_node(erased)
    forget_unrounded(module)
    assert exact_constant(module, node) is stored
    assert "exact" not in erased.meta  # the table of names keeps it alive


def test_an_inserted_call_stands_before_its_node_and_inherits_only_its_origins() -> None:
    module = graph_of(lambda g, x: g.call_function(aten.neg.default, (x,)))
    node = node_of(module, aten.neg.default)
    node.meta |= {"origins": (HERE,), "tensor_meta": "old"}
    new = insert_call(module, node, aten.add.Tensor, node.args[0], 1, alpha=2)
    assert new.next is node
    assert (new.args, new.kwargs) == ((node.args[0], 1), {"alpha": 2})
    assert new.meta == {"origins": (HERE,)}


def test_results_of_a_node_are_read_by_getitem_or_as_a_whole() -> None:
    pool = aten.max_pool2d_with_indices.default
    one = graph_of(lambda g, x: g.call_function(operator.getitem, (g.call_function(pool, (x, [2, 2])), 0)))
    assert [reads_result(node_of(one, pool), index) for index in (0, 1)] == [True, False]
    whole = graph_of(lambda g, x: g.call_function(pool, (x, [2, 2])))
    assert [reads_result(node_of(whole, pool), index) for index in (0, 1)] == [True, True]


def test_the_only_user_reads_a_node_once() -> None:
    def build(g: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
        once, twice = g.call_function(aten.neg.default, (x,)), g.call_function(aten.abs.default, (x,))
        listed, nobody = g.call_function(aten.relu.default, (x,)), g.call_function(aten.exp.default, (x,))
        y = g.call_function(aten.add.Tensor, (once, 1))
        z = g.call_function(aten.mul.Tensor, (twice, twice))
        return y, z, g.call_function(aten.cat.default, ([listed, listed],)), nobody, nobody

    module = graph_of(build)
    node, expected = node_of(module, aten.neg.default), node_of(module, aten.add.Tensor)
    assert only_user(node) is expected
    assert only_user(expected) is module.graph.output_node()
    for target in (aten.abs.default, aten.relu.default, aten.exp.default):
        assert only_user(node_of(module, target)) is None
    assert only_user(module.graph.find_nodes(op="placeholder")[0]) is None


def test_only_operators_that_surely_allocate_make_fresh_tensors() -> None:
    fresh = [call(aten.relu.default), call(aten.add.Tensor, 1), call(aten.softmax.int, 1)]
    shared = [
        call(aten.view.default, [-1]),
        call(aten.relu_.default),
        call(aten.dropout.default, 0.5, False),
        call(aten.contiguous.default),
        call(operator.getitem, 0),
        fresh[0].all_input_nodes[0],
    ]
    assert [makes_fresh_tensor(node) for node in fresh] == [True] * len(fresh)
    assert [makes_fresh_tensor(node) for node in shared] == [False] * len(shared)


def test_outputs_that_may_share_memory_are_cloned_and_no_others() -> None:
    def build(g: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
        view = g.call_function(aten.view.default, (x, [-1]))
        own = g.call_function(aten.neg.default, (x,))
        return x, g.get_attr("w"), view, own, g.call_function(aten.view.default, (own, [-1])), view

    module = graph_of(build, w=torch.ones(3))
    own_outputs(module)
    module.recompile()
    assert len(list(calls(module, [aten.clone.default]))) == 3
    inputs = X.clone()
    outputs = module(inputs)
    assert outputs[2] is outputs[5]
    for output in outputs:
        output.zero_()
    assert torch.equal(inputs, X)
    assert torch.equal(module.get_buffer("w"), torch.ones(3))


def test_outputs_that_no_input_decides_are_found_by_their_places() -> None:
    def build(g: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
        w = g.get_attr("w")
        doubled = g.call_function(aten.mul.Tensor, (w, 2))
        mixed = g.call_function(aten.add.Tensor, (doubled, x))
        return mixed, doubled, x, w, g.call_function(aten.neg.default, (mixed,))

    assert constant_outputs(graph_of(build, w=torch.ones(1))) == {1, 3}


def test_where_names_a_node_and_the_places_it_comes_from() -> None:
    node = call(aten.relu.default)
    assert where(node) == "relu_default"
    node.meta["origins"] = (HERE,)
    assert where(node) == "relu_default (layer.act, net.py:22)"


def test_random_numbers_are_drawn_unless_an_argument_switches_them_off() -> None:
    assert draws_random_numbers(call(aten.rand_like.default))
    assert draws_random_numbers(call(aten.dropout.default, 0.5, True))
    assert not draws_random_numbers(call(aten.dropout.default, 0.5, False))
    attention = aten.scaled_dot_product_attention.default
    assert draws_random_numbers(call(attention, X, X, None, 0.1))
    assert not draws_random_numbers(call(attention, X, X))
    assert not draws_random_numbers(call(aten.relu.default))
    assert not draws_random_numbers(call(operator.getitem, 0))


def test_operators_that_read_strides_or_give_numbers_are_found() -> None:
    plain = graph_of(lambda g, x: g.call_function(aten.view.default, (x, [-1])))
    assert reads_strides(plain) is None
    assert gives_a_number(plain) is None
    strided = graph_of(lambda g, x: g.call_function(aten.as_strided.default, (x, [2], [1])))
    assert reads_strides(strided) is node_of(strided, aten.as_strided.default)
    number = graph_of(lambda g, x: g.call_function(aten.item.default, (x,)))
    assert gives_a_number(number) is node_of(number, aten.item.default)


def test_native_calls_are_those_that_pytorch_does_not_define_and_ours_are_not_opaque() -> None:
    known = [call(aten.relu.default), call(operator.getitem, 0), call(aten.linear.default, X)]
    known += [call(aten.lift_fresh_copy.default), call(aten.detach_copy.default)]  # made of other operators
    assert [(is_native(node), is_opaque(node)) for node in known] == [(False, False)] * len(known)
    ours = call(
        pooling_operators()[aten.max_pool2d_with_indices.default], [2, 2], [2, 2], [0, 0], [1, 1], False
    )
    assert (is_native(ours), is_opaque(ours)) == (True, False)
    foreign = call(graph_of)
    assert (is_native(foreign), is_opaque(foreign)) == (True, True)


def test_a_cast_is_put_between_a_node_and_all_its_readers() -> None:
    def build(g: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
        y = g.call_function(aten.neg.default, (x,))
        return y, g.call_function(aten.mul.Tensor, (y, y))

    module = graph_of(build)
    node = node_of(module, aten.neg.default)
    node.meta |= {"origins": (HERE,), "tensor_meta": "old"}
    cast_for_readers(module, node, torch.float64)
    module.recompile()
    assert [user.target for user in node.users] == [aten._to_copy.default]
    assert next(iter(node.users)).meta == {"origins": (HERE,)}
    outputs = module(X)
    assert [output.dtype for output in outputs] == [torch.float64] * 2
    assert torch.equal(outputs[1], X.double() ** 2)
