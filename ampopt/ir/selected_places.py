"""Reads and writes at a place that a tensor's value is, `buffer[i % 4] = x`: the place stays a tensor.

An export reads the number, `item`, and selects by it: a GPU waits for its host to know, and no CUDA graph or
compiler holds that. `select(x, dim, item(k))` -> `index(x, [None] · dim + [k])`, `select_scatter` ->
`index_put`, and a slice or `narrow` of fixed length -> `index_select(x, dim, k + [0, 1, …])`, its write ->
`index_copy`. Numbers that are computed from such a number become tensors of one int64.

Correct because: the graph is functional when this is done, so that a view and a copy are one. Where `select`
takes a place, -n to n - 1, `index` takes it as the same one, and where it raises, so does `index`.
The number is the same, or no place either (`ampopt.ir.numbers_as_tensors`). What the export checks of it is
left out only where `ampopt.ir.place_checks` proves that the new operators raise if and only if the old ones
or a check did. On a GPU an assertion ends the process's CUDA context, and an error that the host raises does
not: there a place becomes a tensor where it is proven to be in range. A slice is a fixed number of places
where it lies in its tensor, which is proven of all numbers that the checks let pass. A write of what was read
where the write before put it changes nothing.

Declines all numbers that are computed with a number that something else reads: a size, a result, an operator
that this module does not know. So, too, for a number of a tensor on another device, whose reading is no wait
where it is on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils import _pytree as pytree

from ampopt.ir.graph import add_constant, arguments, aten, calls, copy_of, reads_strides
from ampopt.ir.index_ranges import ranges_of_integers
from ampopt.ir.integer_ranges import KNOWN, Range, lies_in, ranges_of
from ampopt.ir.numbers_as_tensors import Exactness, NumbersAsTensors
from ampopt.ir.place_checks import CHECKS, Selection, decided

_ITEMS = (aten.item.default, aten._local_scalar_dense.default)

_READS = (aten.select.int, aten.slice.Tensor, aten.narrow.default)
_WRITES = (aten.select_scatter.default, aten.slice_scatter.default)

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_SELECTED = {
    *_INTEGERS,
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    torch.bool,
}
"""Dtypes for which all operators with indices have kernels; a view is for any."""


_BY_SHAPE: dict[object, str] = {
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like), "self"),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), "self"),
    **dict.fromkeys((aten.rand_like, aten.randn_like, aten.randint_like), "self"),
    **dict.fromkeys((aten.new_empty_strided, aten.copy, aten.fill, aten.zero, aten.sym_size), "self"),
    **dict.fromkeys((aten.expand_as, aten.view_as, aten.reshape_as), "other"),
}
"""Operators that read the shape of an argument alone, and its name."""


def write_out_selected_places(module: fx.GraphModule) -> None:
    """Let a functional graph select by tensors where it does by their values.

    Requires that the nodes have their values (`val`).
    """
    mode = next((v.fake_mode for n in module.graph.nodes if isinstance(v := _value(n), FakeTensor)), None)
    if mode is None or reads_strides(module) is not None:  # what is selected may lie otherwise in memory
        return
    done, known = set[fx.Node](), dict[str, Range]()
    for item in calls(module, _ITEMS):
        if item not in done:
            found = sorted(_computed_with(item))
            done.update(found)
            known = known or _ranges_of_tensors(module)
            items = {node: _bounds(node, known) for node in found if _reads_an_integer(node)}
            if (places := _selections(found, items)) is not None:
                _write_out(NumbersAsTensors(module, mode, Exactness(found, items)), found, places)


def _ranges_of_tensors(module: fx.GraphModule) -> dict[str, Range]:
    """What the integers of tensors may be, by the name of a node; nothing where sizes vary."""
    recorded = copy_of(module)
    for node in recorded.graph.nodes:
        value = node.meta.get("val")
        sizes = [
            size for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) for size in leaf.shape
        ]
        if not all(isinstance(size, int) for size in sizes):
            return {}
        node.meta["tensor_meta"] = map_aggregate(value, _meta_of)
    return {node.name: found for node, found in ranges_of_integers(recorded).items()}


def _meta_of(value: Any) -> Any:
    return _extract_tensor_metadata(value) if isinstance(value, Tensor) else value


def _computed_with(item: fx.Node) -> set[fx.Node]:
    """All that reads a number, that is computed from it, or with what is: up to tensors that are selected."""
    found, todo = {item}, [item]
    while todo:
        node = todo.pop()
        near = {user for user in node.users if not _is_tensor(node) or _reads_memory(user)}
        near |= {source for source in node.all_input_nodes if not _is_tensor(source)}
        todo += (new := near - found)
        found |= new
    return found


def _reads_memory(node: fx.Node) -> bool:
    """Whether a node reads of a tensor how it lies in memory."""
    return node.target in (aten.sym_storage_offset.default, aten.sym_stride.int)


def _selections(found: Sequence[fx.Node], items: Mapping[fx.Node, Range]) -> list[Selection] | None:
    """What selects by these numbers, with how; None where they may be read otherwise, or not be exact.

    `items`: those of tensors, and what they may be.
    """
    devices = {_value(item.args[0]).device for item in items}
    places = [_selection(node) for node in found if node.target in (*_READS, *_WRITES)]
    known = {*_ITEMS, *_READS, *_WRITES, *CHECKS, *KNOWN, aten.sym_storage_offset.default}
    selections = [place for place in places if place is not None]
    if len(selections) < len(places) or not all(node.target in known for node in found):
        return None
    if any(node.target in _ITEMS and node not in items for node in found):
        return None
    if {_value(place.node).device for place in selections} != devices or len(devices) != 1:
        return None
    exactness = Exactness(found, items)
    if not all(exactness.is_no_place_around(place.start) for place in selections):
        return None
    if devices != {torch.device("cpu")} and not _are_in_range(selections, ranges_of(found, items)):
        return None
    return decided(found, selections, items, _needed(found[0].graph))


def _are_in_range(selections: Sequence[Selection], known: Mapping[fx.Node, Range | None]) -> bool:
    """Whether no selection is of a place that is none."""
    for each in selections:
        least, most = (-each.size if each.wraps and each.is_one else 0), each.size - each.length
        if not isinstance(each.size, int) or not lies_in(known[each.start], (least, most)):
            return False
    return True


def _reads_an_integer(node: fx.Node) -> bool:
    """Whether a node reads the number of an integer tensor of one element."""
    value = _value(node.args[0]) if node.target in _ITEMS else None
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        return False
    return all(isinstance(size, int) and size == 1 for size in value.shape)


def _bounds(item: fx.Node, known: Mapping[str, Range]) -> Range:
    """What the number that is read may be; `known`: of tensors, by the name of a node."""
    source = item.args[0]
    assert isinstance(source, fx.Node)
    info = torch.iinfo(_value(source).dtype)
    return known.get(source.name, (info.min, info.max))


def _selection(node: fx.Node) -> Selection | None:
    """How a call selects by a number; None where its result may have no elements, or this is not known."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # it takes a second to load

    own = arguments(node)
    start, whole = own.get("start", own.get("index")), _value(own["self"])
    part = _value(own.get("src", node))
    if not isinstance(whole, Tensor) or not isinstance(part, Tensor) or not isinstance(start, fx.Node):
        return None
    if _is_tensor(start) or own.get("step", 1) != 1 or part.dtype is not whole.dtype:
        return None
    if whole.dtype not in _SELECTED or whole.layout is not torch.strided or part.device != whole.device:
        return None
    if not all(statically_known_true(size > 0) for size in part.shape):
        return None  # PyTorch checks no place where it selects nothing
    dim, is_one = own["dim"] % whole.dim(), "index" in own
    size, length = whole.shape[dim], 1 if is_one else part.shape[dim]
    if not isinstance(length, int) or not (is_one or isinstance(size, int)):
        return None
    wraps = is_one or node.target is aten.narrow.default
    return Selection(node, start, dim, size, length, is_one=is_one, wraps=wraps)


def _needed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes from which outputs are computed: what raises in others is left out with them."""
    found, todo = set[fx.Node](), [graph.output_node()]
    while todo:
        todo += (new := set(_computed_from(todo.pop())) - found)
        found |= new
    return found


def _computed_from(node: fx.Node) -> list[fx.Node]:
    """What a node reads the numbers of: compilers do not compute that of which a shape alone is read."""
    name = _BY_SHAPE.get(getattr(node.target, "overloadpacket", None))
    if name is None:
        return node.all_input_nodes
    sources = list[fx.Node]()
    fx.map_arg([value for each, value in arguments(node).items() if each != name], sources.append)
    return sources


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(_value(node), Tensor)


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _write_out(numbers: NumbersAsTensors, found: Sequence[fx.Node], places: Sequence[Selection]) -> None:
    for place in places:
        _skip_copy(place)
    writer = _Writer(numbers)
    idle = [place for place in places if _is_idle(place)]
    for place in places:
        if place in idle:
            place.node.replace_all_uses_with(arguments(place.node)["self"])
        else:
            writer.write_out(place)
    for node in reversed(found):
        if node.target in CHECKS or not node.users:
            numbers.module.graph.erase_node(node)


def _skip_copy(place: Selection) -> None:
    """Let a write take what is copied to the place before: a copy reads only the shape of what was there."""
    node, given = place.node, arguments(place.node).get("src")
    if not isinstance(given, fx.Node) or given.target is not aten.copy.default or len(given.args) != 2:
        return
    before, copied = given.args
    if not isinstance(before, fx.Node) or not isinstance(copied, fx.Node) or before.target not in _READS:
        return
    values = _value(given), _value(copied)
    if not _is_at_same_place(before, node) or arguments(before)["self"] is not arguments(node)["self"]:
        return
    if not all(isinstance(value, Tensor) for value in values):
        return
    mine, its = ((value.dtype, value.device, *value.shape) for value in values)
    if all(isinstance(size, int) for size in (*mine[2:], *its[2:])) and mine == its:
        node.replace_input_with(given, copied)


def _is_idle(place: Selection) -> bool:
    """Whether a write puts back what the write before it, at the same place, has put there: `x[i] += y`."""
    node, own = place.node, arguments(place.node)
    given, before = own.get("src"), own["self"]
    if not isinstance(given, fx.Node) or given.target not in _READS or before.target is not node.target:
        return False
    is_read_there = arguments(given)["self"] is before and _is_at_same_place(given, node)
    return is_read_there and _is_at_same_place(before, node)


def _is_at_same_place(one: fx.Node, other: fx.Node) -> bool:
    mine, its = arguments(one), arguments(other)
    is_same = all(mine.get(name) is its.get(name) for name in ("index", "start", "end"))
    return is_same and mine["dim"] == its["dim"]


class _Writer:
    """Writes the calls that select by tensors."""

    def __init__(self, numbers: NumbersAsTensors) -> None:
        self._numbers, self._call, self._module = numbers, numbers.call, numbers.module

    def write_out(self, place: Selection) -> None:
        """Replace one call."""
        node, dim = place.node, place.dim
        start = self._numbers.tensor(place.start)
        if place.may_wrap and not place.is_one:
            below = self._call(node, aten.lt.Scalar, start, 0)
            behind = self._call(node, aten.add.Tensor, start, place.size)
            start = self._call(node, aten.where.self, below, behind, start)
        own = arguments(node)
        if place.is_one and place.may_wrap:
            indices = [*[None] * dim, start]
            if "src" in own:
                new = self._call(node, aten.index_put.default, own["self"], indices, own["src"])
            else:
                new = self._call(node, aten.index.Tensor, own["self"], indices)
        else:
            new = self._at_places(place, self._places(place, start), own)
        node.replace_all_uses_with(new)

    def _at_places(self, place: Selection, places: fx.Node, own: dict[str, Any]) -> fx.Node:
        node, dim = place.node, place.dim
        if "src" in own:
            written = own["src"]
            if place.is_one:
                written = self._call(node, aten.unsqueeze.default, written, dim)
            return self._call(node, aten.index_copy.default, own["self"], dim, places, written)
        new = self._call(node, aten.index_select.default, own["self"], dim, places)
        return self._call(node, aten.squeeze.dim, new, dim) if place.is_one else new

    def _places(self, place: Selection, start: fx.Node) -> fx.Node:
        """The places from a first one on, in a tensor of one dimension."""
        places = self._call(place.node, aten.reshape.default, start, [1])
        if place.length == 1:
            return places
        counted = torch.arange(place.length, device=_value(start).device)
        counts = add_constant(self._module, "places", counted, place.node)
        counts.meta["val"] = counted
        return self._call(place.node, aten.add.Tensor, places, counts)
