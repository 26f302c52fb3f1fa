"""Stores the nodes of a program's graph as JSON, and reads them back as an `fx.Graph`.

Names become local variables and attributes in the Python code that `torch.fx` generates from a graph, so they
must be plain identifiers that it does not rename; string arguments are printed into that code, so they may
contain only the characters that operators need. Operators are those of `operator_list`.
"""

from __future__ import annotations

import functools
import keyword
import operator
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampopt.bundle.size_operators import SIZE_OPERATORS, size_operator_name
from ampopt.bundle.stored_values import array, decode_value, encode_value, members, refuse, text
from ampopt.errors import ExportError
from ampopt.ir.operator_list import find_operator, why_not_call, why_not_operator
from ampopt.ir.own_autocast import FULL_PRECISION

MOST_NODES = 100_000
_DEEPEST = 3
"""Nesting of lists among the arguments of an operator."""

_MARKED = "call in fp32"
"""The kind of a call for which the model switches autocast off."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_WORDS = re.compile(r"[A-Za-z0-9_ ,.>-]{0,200}")
"""Strings that operators take: modes, and the equations of einsum."""


def write_nodes(graph: fx.Graph, device: torch.device, file: str) -> list[dict[str, Any]]:
    """The nodes of a graph in order, without its output.

    Raises ExportError for nodes that a file cannot hold.
    """
    return [
        _write_node(node, device, f"{file}, node {node.name!r}")
        for node in graph.nodes
        if node.op != "output"
    ]


def _write_node(node: fx.Node, device: torch.device, where: str) -> dict[str, Any]:
    if node.op == "placeholder":
        return {"input": node.name}
    if node.op == "get_attr":
        return {"weight": node.name, "of": str(node.target)}
    if node.op != "call_function":
        raise ExportError(f"{where}: a file holds calls of operators only, not {node.op}")
    if (number := size_operator_name(node.target)) is not None and not node.kwargs:
        args = [_write_argument(value, device, where) for value in node.args]
        return {"number": node.name, "operator": number, "args": args}
    if node.target is not operator.getitem and (reason := why_not_operator(node.target)):
        raise ExportError(f"{where}: a file cannot hold {node.target}: {reason}")
    return {
        _MARKED if FULL_PRECISION in node.meta else "call": node.name,
        "operator": "getitem" if node.target is operator.getitem else str(node.target),
        "args": [_write_argument(value, device, where) for value in node.args],
        "kwargs": {name: _write_argument(value, device, where) for name, value in node.kwargs.items()},
    }


def _write_argument(value: object, device: torch.device, where: str) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [_write_argument(part, device, where) for part in value]
    if type(value) is tuple:
        return {"tuple": [_write_argument(part, device, where) for part in value]}
    return encode_value(value, device, where)


def read_graph(
    nodes: object,
    results: Sequence[object],
    weights: Set[str],
    device: torch.device,
    file: str,
    *,
    sizes_vary: bool = False,
) -> fx.Graph:
    """The graph of the `nodes` that `write_nodes` wrote, which returns the nodes named in `results`.

    `weights` are the names of all weights; the graph must read each of them and no others. Only where
    `sizes_vary` it may compute with sizes. Raises BundleError, naming the node, for malformed and repeated
    names, references to nodes that do not come before, unknown or refused operators, and invalid values.
    """
    graph = fx.Graph()
    found: dict[str, fx.Node] = {}
    read = set()
    for number, data in enumerate(array(nodes, f"{file}, nodes")):
        if number == MOST_NODES:
            refuse(f"{file}, nodes", f"more than {MOST_NODES} nodes")
        kind = next(iter(data), None) if isinstance(data, dict) else None
        where = f"{file}, node {number}"
        if kind == "input":
            (name,) = members(data, ("input",), where)
            node = graph.placeholder(_identifier(name, where))
        elif kind == "weight":
            name, weight = members(data, ("weight", "of"), where)
            node = _read_weight(graph, _identifier(name, where), weight, weights, where)
            read.add(node.target)
        elif kind == "number" and sizes_vary:
            name, *call = members(data, ("number", "operator", "args"), where)
            node = _read_number(
                graph, _identifier(name, where), call, found, device, f"{file}, node {name!r}"
            )
        else:
            kind = _MARKED if kind == _MARKED else "call"
            name, *call = members(data, (kind, "operator", "args", "kwargs"), where)
            name = _identifier(name, where)
            node = _read_call(graph, name, call, found, device, f"{file}, node {name!r}")
            if kind == _MARKED:
                node.meta[FULL_PRECISION] = True
        if name in found or node.name != name:  # torch.fx renames what would shadow a name that it uses
            refuse(where, f"the name {name!r} is taken")
        found[name] = node
    for name in weights - read:
        refuse(f"{file}, weights", f"{name[:100]!r} is read by no node")
    graph.output(tuple(_reference(result, found, f"{file}, outputs") for result in results))
    return graph


def _read_weight(graph: fx.Graph, name: str, weight: object, weights: Set[str], where: str) -> fx.Node:
    weight = _identifier(weight, where)
    if weight not in weights:
        refuse(where, f"there is no weight {weight!r}")
    if weight in _names_of_modules():
        refuse(where, f"a weight cannot be called {weight!r}")
    return graph.create_node("get_attr", weight, name=name)


@functools.cache
def _names_of_modules() -> frozenset[str]:
    """The attributes that a graph module has before it has weights."""
    return frozenset(dir(fx.GraphModule(torch.nn.Module(), fx.Graph())))


def _read_call(
    graph: fx.Graph,
    name: str,
    call: Sequence[object],
    found: Mapping[str, fx.Node],
    device: torch.device,
    where: str,
) -> fx.Node:
    target, args, kwargs = call
    function = _operator(text(target, where), where)
    values = tuple(_read_argument(value, found, device, where) for value in array(args, where))
    if not isinstance(kwargs, dict):
        refuse(where, "expected an object of keyword arguments")
    named = {key: _read_argument(value, found, device, where) for key, value in kwargs.items()}
    known = {a.name for a in function._schema.arguments} if isinstance(function, OpOverload) else set()
    for key in named:
        if key not in known or keyword.iskeyword(key):
            refuse(where, f"{target} has no argument {reprlib.repr(key)}")
    node = graph.create_node("call_function", function, values, named, name)
    if reason := why_not_call(node):
        refuse(where, f"the operator {target} cannot be called like this: {reason}")
    return node


def _read_number(
    graph: fx.Graph,
    name: str,
    call: Sequence[object],
    found: Mapping[str, fx.Node],
    device: torch.device,
    where: str,
) -> fx.Node:
    target, args = call
    if not isinstance(target, str) or target not in SIZE_OPERATORS:
        refuse(where, f"there is no operator of sizes {reprlib.repr(target)}")
    values = tuple(_read_argument(value, found, device, where) for value in array(args, where))
    return graph.create_node("call_function", SIZE_OPERATORS[target], values, name=name)


def _operator(name: str, where: str) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    found = find_operator(name)
    if found is None:
        refuse(where, f"this PyTorch ({torch.__version__}) has no ATen operator {reprlib.repr(name)}")
    if reason := why_not_operator(found):
        refuse(where, f"the operator {name} is not allowed: {reason}")
    return found


def _read_argument(
    data: object, found: Mapping[str, fx.Node], device: torch.device, where: str, depth: int = 0
) -> Any:
    if depth > _DEEPEST:
        refuse(where, "no operator takes lists nested as deep as this")
    if isinstance(data, list):
        return [_read_argument(part, found, device, where, depth + 1) for part in data]
    if isinstance(data, dict) and data.keys() == {"tuple"}:
        parts = array(data["tuple"], where)
        return tuple(_read_argument(part, found, device, where, depth + 1) for part in parts)
    if isinstance(data, dict) and data.keys() == {"node"}:
        return _reference(data["node"], found, where)
    value = decode_value(data, device, where)
    if isinstance(value, str) and not _WORDS.fullmatch(value):
        refuse(where, f"no operator takes the string {reprlib.repr(value)}")
    return value


def _reference(name: object, found: Mapping[str, fx.Node], where: str) -> fx.Node:
    if not isinstance(name, str) or name not in found:
        refuse(where, f"no node before it is called {reprlib.repr(name)}")
    return found[name]


def _identifier(data: object, where: str) -> str:
    """A name that may stand in generated code; `self` is what that code calls the module."""
    if not isinstance(data, str) or not _IDENTIFIER.fullmatch(data):
        refuse(where, f"{reprlib.repr(data)} is not a name")
    if keyword.iskeyword(data) or data.startswith("__") or data == "self":
        refuse(where, f"{data!r} is not a name")
    return data
