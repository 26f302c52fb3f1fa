"""A graph as it was before another package's code had it, to tell whether it changed, and to put it back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from ampopt.ir.origin import origins_of
from ampopt.ir.own_autocast import FULL_PRECISION

_DERIVED = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_in_spec", "_out_spec", "meta"})
"""Attributes of a graph module that follow from its graph, which is compared by itself, or have no reader."""


class KeptGraph:
    """A graph module: its attributes, and its nodes with what passes read of their `meta`; blocks in it, too.

    Other values of `meta` (`tensor_meta`, which `ShapeProp` notes) are put back, and are no change.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        modules = list(module.named_modules())
        self._attributes = [(name, each, _attributes_of(each)) for name, each in modules]
        self._graphs = [_Nodes(name, each) for name, each in modules if isinstance(each, fx.GraphModule)]

    def put_back(self) -> str | None:
        """Make the graph what it was; what had been changed in it first, or None if nothing had."""
        changed = [what for held in self._attributes for what in _put_back_attributes(*held)]
        changed += [what for nodes in self._graphs if (what := nodes.put_back()) is not None]
        return changed[0] if changed else None


class _Nodes:
    """The nodes of one graph."""

    def __init__(self, name: str, module: fx.GraphModule) -> None:
        self._name, self._module = name, module
        self._looks = list(_looks_of(module.graph))
        self._graph, self._code = copy.deepcopy(module.graph), module.code
        for node in self._graph.nodes:
            node.meta = _copied_meta(node)

    def put_back(self) -> str | None:
        """Make the nodes what they were; the first one that was not, or None."""
        now = list(_looks_of(self._module.graph))
        pairs = zip(self._looks, now, strict=False)
        first = next((before[0] for before, after in pairs if before != after), None)
        if first is None and len(now) != len(self._looks):
            first = max(now, self._looks, key=len)[min(len(now), len(self._looks))][0]
        if first is None and self._module.code != self._code:  # of nodes that are as before again
            first = "its code"
        if first == "its code" or [look[:-1] for look in now] != [look[:-1] for look in self._looks]:
            self._module.graph = self._graph
        else:
            for node, kept in zip(self._module.graph.nodes, self._graph.nodes, strict=True):
                node.meta.clear()
                node.meta.update(kept.meta)
        return first and ".".join(filter(None, (self._name, first)))


def _looks_of(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """A node's name, what it computes from what, and what passes read of its `meta`."""
    for node in graph.nodes:
        read = origins_of(node), id(node.meta.get("exact")), repr(node.meta.get(FULL_PRECISION, ""))
        yield node.name, node.op, node.target, repr(node.args), repr(node.kwargs), read


def _copied_meta(node: fx.Node) -> dict[str, Any]:
    return {
        key: copy.copy(value) if type(value) in (dict, list, set) else value
        for key, value in node.meta.items()
    }


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, with copies of the collections among them."""
    return {
        name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
        for name, value in vars(module).items()
        if not (isinstance(module, fx.GraphModule) and name in _DERIVED)
    }


def _put_back_attributes(path: str, module: nn.Module, held: dict[str, Any]) -> list[str]:
    """Give a module the attributes that it had; the names of those that were others.

    New ones stay, which compilers note, unless they take the place of the class's own, as `forward` would.
    The mode is put back, and is no change: it changes nothing that a graph computes.
    """
    changed, now = [], _attributes_of(module)
    for name in [*held, *(name for name in now if name not in held and hasattr(type(module), name))]:
        if name in held and name in now and _is_same(held[name], now[name]):
            continue
        if name != "training":
            changed += [".".join(filter(None, (path, each))) for each in _differing(name, held, now)]
        if name in held:
            vars(module)[name] = held[name]
        else:
            del vars(module)[name]
    return changed


def _differing(name: str, held: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs in an attribute that differs: names of the module's weights or submodules, or its own."""
    before, after = held.get(name), now.get(name)
    if name not in ("_buffers", "_parameters", "_modules") or not type(before) is type(after) is dict:
        return [name]
    return [key for key in {**before, **after} if before.get(key, name) is not after.get(key, name)]


def _is_same(before: Any, after: Any) -> bool:
    """Whether a value is the same object, or a collection of the same ones."""
    if before is after:
        return True
    if type(before) is not type(after) or not isinstance(before, (dict, list, set)):
        return False
    return bool(_ids(before) == _ids(after))


def _ids(collection: Any) -> object:
    """What a collection holds, by identity."""
    if isinstance(collection, dict):
        return {key: id(value) for key, value in collection.items()}
    return [*map(id, collection)] if isinstance(collection, list) else {*map(id, collection)}
