"""Alias analysis of an exported graph: which tensors may share memory, which are written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx

from ampopt.ir.graph import arguments, makes_fresh_tensor


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to; all of them if that is unknown."""
    return _arguments_that(node, write=True)


def aliased_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call's result may share memory with; all of them if that is unknown."""
    overload = node.target
    if makes_fresh_tensor(node):
        return []
    if isinstance(overload, torch._ops.OpOverload) and any(r.alias_info for r in overload._schema.returns):
        return _arguments_that(node, write=False)
    return list(node.all_input_nodes)


def may_be_memory_of(node: fx.Node, op: str) -> bool:
    """Whether a node may share memory with one of a kind: `placeholder` or `get_attr`."""
    return node.op == op or any(may_be_memory_of(source, op) for source in aliased_by(node))


def sharing(node: fx.Node, is_apart: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes that may share memory with a node, itself included.

    What `is_apart` shares no memory with its arguments, whatever its schema says.
    """
    found, todo = {node}, [node]
    while todo:
        last = todo.pop()
        above = [] if is_apart(last) else aliased_by(last)
        users = [user for user in last.users if user.op != "output" and not is_apart(user)]
        below = [user for user in users if last in aliased_by(user)]
        todo += (new := {*above, *below} - found)
        found |= new
    return found


def is_returned(nodes: Iterable[fx.Node]) -> bool:
    """Whether one of the nodes is an output of its graph."""
    return any(node.graph.output_node() in node.users for node in nodes)


def _arguments_that(node: fx.Node, *, write: bool) -> list[fx.Node]:
    """The arguments that a call, by its schema, writes to, or else those that its result aliases."""
    if node.op != "call_function":
        return []
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.all_input_nodes) if any(map(_writes, node.all_input_nodes)) else []
    values, found = arguments(node), list[fx.Node]()
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and (argument.is_write or not write):
            fx.map_arg(values.get(argument.name), found.append)
    return found


def _writes(node: fx.Node) -> bool:
    """Whether a node is a block, such as one under the model's own autocast, with a call that writes."""
    owner = node.graph.owning_module
    block = getattr(owner, str(node.target), None) if node.op == "get_attr" else None
    return isinstance(block, fx.GraphModule) and any(
        isinstance(inner.target, torch._ops.OpOverload) and inner.target._schema.is_mutable
        for module in block.modules()
        if isinstance(module, fx.GraphModule)
        for inner in module.graph.nodes
    )


def families(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """For each node those that may share memory with it, itself included: one set for all of them."""
    family = {node: {node} for node in graph.nodes}
    for node in graph.nodes:
        for source in aliased_by(node):
            if family[source] is not family[node]:
                family[source] |= family[node]
                for member in family[node]:
                    family[member] = family[source]
    return family


def never_written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory no call of the graph writes to, under any alias."""
    family = families(graph)
    written = {id(family[target]) for node in graph.nodes for target in written_by(node)}
    return {node for node in graph.nodes if id(family[node]) not in written}


def overlapping_write(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The first call that writes to a tensor with overlapping elements, or to a part of one."""
    return _first_write(nodes, lambda node: _overlaps_itself(node.meta.get("val")))


def write_between_gaps(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The first call that writes to windows of a tensor, `unfold`, with elements beside or between them.

    PyTorch makes these 0 where it makes a graph functional.
    """
    return _first_write(nodes, _has_gaps)


def _first_write(nodes: Iterable[fx.Node], is_wrong: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The first call that writes to a node, or to a view of one, for which something is wrong."""
    for node in nodes:
        waiting, seen = written_by(node), set[fx.Node]()
        while waiting:
            target = waiting.pop()
            if target in seen:
                continue
            seen.add(target)
            if is_wrong(target):
                return node
            waiting += aliased_by(target)
    return None


def _has_gaps(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.unfold.default:
        return False
    windows, whole = node.meta.get("val"), arguments(node)["self"].meta.get("val")
    known = isinstance(windows, Tensor) and isinstance(whole, Tensor)
    return not known or bool(windows.numel() != whole.numel())  # type: ignore[union-attr]


def _overlaps_itself(value: object) -> bool:
    """Whether elements may share memory: where a stride is no longer than what the shorter ones span."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return False  # a size that depends on values is of a result of its own, laid out densely
    if 0 in value.shape:
        return False
    span = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False
