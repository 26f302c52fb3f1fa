"""The nodes of a graph that make choices by values, see `choices`."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from torch import Tensor, fx

from ampopt.ir.choice_keys import KINDS, Key
from ampopt.ir.choices import Choice
from ampopt.ir.graph import arguments, calls, copy_of, dtype_of, finish, shape_of, where


def makes_choices(graph: fx.GraphModule) -> bool:
    """Whether a graph has operators that tell places."""
    return any(True for _ in calls(graph, KINDS))


def with_places(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[str]]:
    """A copy of a graph with outputs after its own, the places that are read; and these nodes' names in it.

    Where those of an operator are read, those of its like are given, too: others are followed in their order.
    """
    module = copy_of(graph)
    found = list(calls(module, KINDS))
    read = {node.target for node in found if _is_places(node) or _places_of(node)}
    given = list[fx.Node]()
    for node in (each for each in found if each.target in read):
        if _is_places(node):
            given.append(node)
        elif places := _places_of(node):
            given.append(places[0])
        else:
            with module.graph.inserting_after(node):
                given.append(module.graph.call_function(operator.getitem, (node, 1)))
    output = module.graph.output_node()
    results: Any = output.args[0]
    output.args = ((*results, *given),)
    return finish(module), [node.name for node in given]


def _is_places(node: fx.Node) -> bool:
    """Whether they are all that it gives."""
    target: Any = node.target
    return len(target._schema.returns) == 1


def _places_of(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.users if each.target is operator.getitem and each.args[1] == 1]


@dataclasses.dataclass(frozen=True)
class Chooser:
    """A node of a graph that makes choices, its place in the user's model, and whether places are read."""

    key: Key
    where: str
    is_read: bool
    places: str
    """The name of the node that has its places; empty where none has."""
    keeps_dim: bool

    def choice(self, places: Tensor) -> Choice:
        """Its choice, of places as its node gives them."""
        return Choice(self.key, self.key.in_rows(places, keeps_dim=self.keeps_dim))

    @classmethod
    def all_in(cls, graph: fx.GraphModule) -> list[Chooser]:
        """Those of a graph, after `shapes.record_shapes`, in order; integers are chosen from exactly.

        As in a run, a single value, and where none is taken, makes no choice.
        """
        found = []
        for node in calls(graph, KINDS):
            given = arguments(node)
            shape = shape_of(given["self"])
            if not dtype_of(given["self"]).is_floating_point or 0 in (len(shape), *shape, given.get("k")):
                continue
            parts = _places_of(node)
            places = node.name if _is_places(node) else parts[0].name if parts else ""
            key = Key.of(node.target, shape, given)
            found.append(cls(key, where(node), bool(places), places, key.keeps_dim(given)))
        return found
