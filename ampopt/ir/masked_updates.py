"""Updates of what a mask selects, `y[mask] *= 2`: computed everywhere, kept where the mask is true.

How many elements a mask selects is known only when the model is called: a GPU waits for its host to know,
and no CUDA graph or compiler holds what has a size that values decide.

Correct because: what lies between the selection and the place it is put back to are operators that compute
each element from the elements at its place and from numbers alone, so an element that the mask selects has
the same value in both orders (but for the last bit where PyTorch computes a vector of numbers and the rest
behind it in two ways), and the others keep what they were. An operator that may raise
for elements that nobody selected, a division of integers, is left alone. The selection is a copy and becomes
a copy, so that writes in place, before and after, mean what they meant.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from ampopt.ir.aliasing import never_written, written_by
from ampopt.ir.fake_values import result_of
from ampopt.ir.graph import arguments, aten, calls, insert_call

_PUTS = (aten.index_put_.default, aten.index_put.default)

_GIVEN = (aten.index.Tensor, *_PUTS)

_SELECTED_OTHERWISE = (aten.nonzero_numpy.default, aten.where.default)
"""Operators that give the places of a mask's true elements, one index for each dimension."""

_BY_ELEMENT = {
    *("to", "_to_copy", "clone", "contiguous", "detach", "type_as", "zeros_like", "ones_like", "full_like"),
    *("hardswish", "masked_fill", "where", "fill", "zero", "copy", "absolute", "negative", "rsub"),
    *("multiply", "subtract", "divide", "true_divide", "floor_divide"),
}
"""Operators that compute by element, which PyTorch has not marked so in all their forms."""

_RAISING = {"div", "divide", "floor_divide", "remainder", "fmod", "pow"}
"""Operators that raise for some integers."""

_CHECKS = {
    *(aten.sym_size.int, aten._assert_scalar.default, aten.sym_constrain_range.default),
    *(aten.sym_constrain_range_for_size.default, aten._assert_tensor_metadata.default),
    *(operator.ge, operator.le, operator.eq),
}
"""Calls by which an export states what it has assumed of a tensor, above all how many elements it has."""


def write_out_masked_updates(exported: ExportedProgram) -> None:
    """Compute what is put back to the places of a mask everywhere, where that changes no value."""
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        is_block = module is not exported.graph_module
        for put in calls(module, _PUTS):
            if (selected := _selected(put, is_block=is_block)) is not None:
                _write_out(module, selected)
        for listed in calls(module, _SELECTED_OTHERWISE):
            _drop_unread(module, listed)


def _selected(put: fx.Node, *, is_block: bool) -> list[fx.Node] | None:
    """The calls between selections by a mask and where all of them are put back to its places, in order.

    None where not all of them compute by element, or something else reads a selection.
    """
    if not _is_by_mask(put):
        return None  # also what an earlier one has written out
    found, todo, checks = {put}, [put], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node.target is aten.index.Tensor or (node.target in _PUTS and node is not put):
            if not _same_places(node, put):
                return None
        elif node is not put and not _is_by_element(node, _behind(put)):
            return None
        if node.target in _PUTS:
            near = {arguments(node)["values"]}
        elif node.target is aten.index.Tensor:
            near = set(node.users)
        else:
            near = {*node.all_input_nodes, *node.users}
        for other in near:
            if not isinstance(other, fx.Node) or other in found:
                continue
            if other in node.users and _only_checks(other, checks):
                continue
            if other in node.users or _depends_on_values(other):
                found.add(other)
                todo.append(other)
    order = {node: place for place, node in enumerate(put.graph.nodes)}
    return sorted(found | checks, key=order.__getitem__) if _stays(found, order, is_block=is_block) else None


def _write_out(module: fx.GraphModule, selected: list[fx.Node]) -> None:
    for node in selected:
        if node.target in _CHECKS:
            continue
        if node.target is aten.index.Tensor:
            whole = insert_call(module, node, aten.clone.default, node.args[0])
            node.replace_all_uses_with(whole)
            _note_value(whole)
        elif node.target in _PUTS:
            own = arguments(node)
            chosen = insert_call(
                module, node, aten.where.self, _mask(module, node), own["values"], own["self"]
            )
            _note_value(chosen)
            if node.target is aten.index_put_.default:
                chosen = insert_call(module, node, aten.copy_.default, own["self"], chosen)
                _note_value(chosen)
            node.replace_all_uses_with(chosen)
        else:
            _note_value(node)
    for node in reversed(selected):
        if node.target in (*_CHECKS, *_PUTS, aten.index.Tensor):
            module.graph.erase_node(node)


def _drop_unread(module: fx.GraphModule, listed: fx.Node) -> None:
    """Remove places that nothing reads any more but what states how many there are."""
    checks = set[fx.Node]()
    if all(_only_checks(user, checks) for places in listed.users for user in places.users):
        for node in reversed(list(module.graph.nodes)):
            if node in checks or node is listed or node in listed.users:
                module.graph.erase_node(node)


def _places(node: fx.Node) -> tuple[int, fx.Node] | None:
    """By which mask a call selects, and behind how many dimensions; None where it does so in another way."""
    given = list(arguments(node)["indices"])
    indices = [index for index in given if index is not None]
    before = len(given) - len(indices)
    if any(index is None for index in given[before:]) or not indices:
        return None
    sources = {index.args[0] if index.target is operator.getitem else None for index in indices}
    listed = next(iter(sources))
    if isinstance(listed, fx.Node) and listed.target in _SELECTED_OTHERWISE and len(sources) == 1:
        mask = listed.all_input_nodes[0]
        is_whole = [index.args[1] for index in indices] == list(range(_value(mask).dim()))
        return (before, mask) if is_whole and _is_mask_for(mask, node) else None
    return (before, indices[0]) if len(indices) == 1 and _is_mask_for(indices[0], node) else None


def _is_mask_for(index: fx.Node, node: fx.Node) -> bool:
    """Whether an index is of booleans; one on the CPU may index a tensor on a GPU, but not choose there."""
    given, source = (each.meta.get("val") for each in (index, arguments(node)["self"]))
    if not isinstance(given, Tensor) or not isinstance(source, Tensor):
        return False
    return given.dtype is torch.bool and given.device == source.device


def _has_same_shape(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are known to have one shape, without a condition on sizes that vary."""
    if all(isinstance(size, int) for size in (*one.shape, *other.shape)):
        return one.shape == other.shape
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # it takes a second to load

    pairs = zip(one.shape, other.shape, strict=False)
    return one.dim() == other.dim() and all(statically_known_true(a == b) for a, b in pairs)


def _is_by_mask(put: fx.Node) -> bool:
    own = arguments(put)
    values = own["values"]
    return not own["accumulate"] and _depends_on_values(values) and _places(put) is not None


def _same_places(one: fx.Node, other: fx.Node) -> bool:
    """Whether two calls select the same elements of tensors of one shape."""
    mine, its = _places(one), _places(other)
    if mine is None or its is None or mine[0] != its[0] or not _is_same(mine[1], its[1]):
        return False
    sources = [arguments(node)["self"] for node in (one, other)]
    return not any(map(_depends_on_values, sources)) and _has_same_shape(*map(_value, sources))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arguments are one, or the same calls of the same."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or one is other:
        return type(one) is type(other) and one == other
    if one.op != "call_function" or one.target is not other.target or written_by(one):
        return False
    mine, its = (tuple(fx.node.map_aggregate((n.args, n.kwargs), lambda a: a)) for n in (one, other))
    flat = [torch.utils._pytree.tree_leaves(both) for both in (mine, its)]
    return len(flat[0]) == len(flat[1]) and all(map(_is_same, *flat))


def _behind(put: fx.Node) -> int:
    """How many dimensions lie behind those of the mask: they stay as they are."""
    before, mask = _places(put)  # type: ignore[misc]
    return int(_value(arguments(put)["self"]).dim() - before - _value(mask).dim())


def _is_by_element(node: fx.Node, behind: int) -> bool:
    """Whether a call computes each element of its result from those at its place, and from numbers.

    A tensor of the last dimensions alone, such as a scale of channels, is the same for every place.
    """
    overload = node.target
    if not isinstance(overload, torch._ops.OpOverload) or overload.namespace != "aten":
        return False
    name = overload._schema.name.removeprefix("aten::").rstrip("_")
    marked = torch.Tag.pointwise in overload.tags  # of `max`, the one of two tensors is
    if torch.Tag.nondeterministic_seeded in overload.tags or not (marked or name in _BY_ELEMENT):
        return False
    tensors = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    if name in _RAISING and not all(_value(source).is_floating_point() for source in (node, *tensors)):
        return False
    if not all(map(_depends_on_values, written_by(node))):
        return False
    rest = [_value(source) for source in node.all_input_nodes if not _depends_on_values(source)]
    return all(isinstance(v, Tensor) and (_is_one(v) or v.dim() <= behind) for v in rest)


def _is_one(value: Tensor) -> bool:
    return all(isinstance(size, int) and size == 1 for size in value.shape)


def _only_checks(node: fx.Node, checks: set[fx.Node]) -> bool:
    """Whether a node and all that read it only state how many elements there are; those are added."""
    if node.target not in _CHECKS:
        return False
    found, todo = {node}, [node]
    while todo:
        new = set(todo.pop().users) - found
        if any(user.target not in _CHECKS for user in new):
            return False
        found |= new
        todo += new
    checks |= found
    return True


def _stays(found: set[fx.Node], order: dict[fx.Node, int], *, is_block: bool) -> bool:
    """Whether the masks are equal: one that nothing writes to, or nothing is written but to selections.

    That holds from the first mask until the last selection is put back, which is after all readings of it.
    In a block, as under the model's own autocast, inputs may be views of each other.
    """
    masks = {place[1] for node in found if node.target in _GIVEN if (place := _places(node)) is not None}
    if not is_block and len(masks) == 1 and masks <= never_written(next(iter(masks)).graph):
        return True
    last = max(found, key=order.__getitem__)
    between = range(min(order[mask] for mask in masks), order[last])
    return all(
        order[node] not in between or all(target in found for target in written_by(node)) for node in order
    )


def _mask(module: fx.GraphModule, put: fx.Node) -> fx.Node:
    """The mask of a call with as many dimensions as the tensor that it writes to."""
    before, mask = _places(put)  # type: ignore[misc]
    for dim in [0] * before + [-1] * _behind(put):
        mask = insert_call(module, put, aten.unsqueeze.default, mask, dim)
        _note_value(mask)
    return mask


def _value(node: Any) -> Any:
    return node.meta["val"]


def _depends_on_values(node: Any) -> bool:
    """Whether a tensor has a size that the inputs' values decide."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or all(isinstance(size, int) for size in value.shape):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # it takes a second to load

    return bool(free_unbacked_symbols(value.shape))


def _note_value(node: fx.Node) -> None:
    """Note the tensor without numbers that a call gives now."""
    mode = next(_value(s).fake_mode for s in node.all_input_nodes if isinstance(_value(s), FakeTensor))
    node.meta["val"] = result_of(mode, node.target, node)
    node.meta.pop("unbacked_bindings", None)
