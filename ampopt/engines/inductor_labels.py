"""Runs inductor's code with each of its statements in a range that names the graph's nodes it computes.

Inductor writes the names above its calls: `# Topologically Sorted Source Nodes: [conv2d, relu], …`. Where it
writes none (on a CPU above its own kernels), a range has no names. A graph that is sent to another process
loses its nodes' names there, and equal graphs share their code: so each node is named by its place before
inductor gets the graph.
"""

from __future__ import annotations

import ast
import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch.fx.traceback import NodeSource

from ampopt.ir.graph import calls
from ampopt.ir.parts import walk

Label = Callable[[str, str], contextlib.AbstractContextManager[Any]]
"""Opens a range for what is called, and the names of its nodes: separated by commas, empty if unknown."""

_SOURCES = re.compile(r"^\s*# Topologically Sorted Source Nodes: \[([^\]]*)\]")
_LABEL = "_ampopt_label"
_PLACE = "ampopt_at_"


def name_by_place(module: fx.GraphModule) -> None:
    """Name the calls of a graph by their places, as inductor's code will.

    Each call is its own source: fx tells no source of a node without metadata, as in a graph that was sent.
    """
    for place, node in enumerate(calls(module)):
        node.name = f"{_PLACE}{place}"
        node.meta["from_node"] = [NodeSource(node)]


def name_sources_by_place(traced: fx.GraphModule) -> None:
    """Give each node of a graph that inductor has traced the source that is named by its place.

    Inductor's code names the nearest source. On a CPU torch 2.10 copies the graph before it traces it, and
    the copy's nodes have names of their own; but each source knows what it comes from itself.
    """
    for node in traced.graph.nodes:
        sources: list[NodeSource] = node.meta.get("from_node", [])
        while sources and not sources[0].name.startswith(_PLACE):
            sources = sources[0].from_node
        if sources:
            node.meta["from_node"] = sources


def names_of(places: str, graph: fx.GraphModule) -> str:
    """The names in the graph of those that the code names; others are left out.

    Inductor's own rewrites, and code that an older version has compiled, name no places.
    """
    own = [node.name for node in calls(graph)]
    found = (place.removeprefix(_PLACE) for place in places.split(",") if place.startswith(_PLACE))
    return ",".join(own[int(place)] for place in found if place.isdecimal() and int(place) < len(own))


@contextlib.contextmanager
def labelled(code: Any, graph: fx.GraphModule, label: Label) -> Iterator[None]:
    """In the block, calls of a graph's `CompiledFxGraph` open ranges. Raises LookupError for unknown code."""
    before = code.current_callable
    code.current_callable = _with_labels(code, lambda called, places: label(called, names_of(places, graph)))
    try:
        yield
    finally:
        code.current_callable = before


def _with_labels(code: Any, label: Label) -> Callable[..., Any]:
    function, owner = _call_of(code.current_callable)
    lines = str(code.source_code).splitlines()
    every = ast.walk(ast.parse(code.source_code))
    made = next((n for n in every if isinstance(n, ast.FunctionDef) and n.name == "call"), None)
    if made is None:
        raise LookupError("inductor's code has no function `call`")
    made.body = _labelled(made.body, lines, made.lineno)
    module = ast.fix_missing_locations(ast.Module([made], []))
    namespace: dict[str, Any] = {}
    globals_of_code = {**function.__globals__, _LABEL: label}
    exec(compile(module, "<ampopt: inductor's code with labels>", "exec"), globals_of_code, namespace)
    call: Callable[..., Any] = namespace["call"]
    return call if owner is None else types.MethodType(call, owner)


def _call_of(current: Any) -> tuple[Any, Any]:
    """The function `call` of inductor's module, and the object that it is a method of."""
    for _, value in walk(current, code=False, classes=False):
        if isinstance(value, types.MethodType) and value.__func__.__name__ == "call":
            return value.__func__, value.__self__
        if isinstance(value, types.FunctionType) and value.__name__ == "call":
            return value, None
    raise LookupError("inductor's code has no function `call`")


def _labelled(body: list[ast.stmt], lines: list[str], start: int) -> list[ast.stmt]:
    """Statements with each that may launch something in a range; `start` is the line above the first.

    The names stand above the launch, with what prepares it (`stream0 = get_raw_stream(0)`) in between.
    """
    made: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.With):
            statement.body = _labelled(statement.body, lines, statement.lineno)
            made.append(statement)
            start = statement.end_lineno or statement.lineno
        elif isinstance(statement, (ast.Expr, ast.Assign)) and (called := _called(statement)):
            above = [_SOURCES.match(line) for line in lines[start : statement.lineno - 1]]
            names = next((match[1] for match in reversed(above) if match is not None), "")
            made.append(_in_range(statement, called, names.replace(" ", "")))
            start = statement.end_lineno or statement.lineno
        else:
            made.append(statement)
    return made


_PREPARING = (
    *("args.", "empty_strided", "assert_", "reinterpret_tensor", "get_raw_stream", "alloc_from_pool"),
    "torch.cuda.set_device",
)
"""How the functions are called that launch nothing."""


def _called(statement: ast.stmt) -> str:
    """What a statement calls; empty where that launches nothing."""
    call = next((node for node in ast.walk(statement) if isinstance(node, ast.Call)), None)
    name = "" if call is None else ast.unparse(call.func)
    return "" if name.lstrip("_").startswith(_PREPARING) else name.removesuffix(".run")


def _in_range(statement: ast.stmt, called: str, names: str) -> ast.stmt:
    words: list[ast.expr] = [ast.Constant(called), ast.Constant(names)]
    opened = ast.Call(ast.Name(_LABEL, ast.Load()), words, [])
    return ast.With([ast.withitem(opened)], [statement])
