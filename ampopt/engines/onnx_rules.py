"""The rewrite rules of torch.onnx's exporter (onnxscript's, 0.5 to 0.7): what they may match, and keep."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ampopt.errors import need

_OF_A_MATCH = {"_graph", "_current_node", "_match", "_tracer"}
"""The attributes that a rule's matcher sets anew for each match."""

_TOLERANCES = ("_rel_tol", "_abs_tol")
"""The attributes of a number in a rule's pattern."""


@contextlib.contextmanager
def exact_rules() -> Iterator[None]:
    """Let the rules take a number for 0 or 1 only where it is, in the block.

    They drop `x + c` up to c = 1e-8, and `x * c` up to |c - 1| = 1e-5: `y / (y.sum() + 1e-8)` became NaN
    where `y` is 0. Enter it within `capturing`: the rules are the whole process's.
    """
    need("onnxscript.rewriter", "onnx")
    before = [(number, {name: getattr(number, name) for name in _TOLERANCES}) for number in _numbers()]
    try:
        for number, tolerances in before:
            vars(number).update(dict.fromkeys(tolerances, 0.0))
        yield
    finally:
        for number, tolerances in before:
            vars(number).update(tolerances)


@contextlib.contextmanager
def constants_apart() -> Iterator[None]:
    """Let the rules give each constant that they make a name of its own, in the block.

    They name the bounds of a value's clamp after the value: those of a second clamp took the first one's
    place, and the model was not valid. Enter it within `capturing`: the rules are the whole process's.
    """
    with _rewriting(lambda _rule, rewrite: _with_constants_apart(rewrite)):
        yield


@contextlib.contextmanager
def tried_where_they_begin() -> Iterator[None]:
    """Let the rules be tried, in the block, at nodes of the operator alone that their pattern begins with.

    At any other node a matcher fails, but the one of a pattern with two results lists all nodes of the graph
    first: of an export of 3,500 nodes that took a third of the time. Enter it after `constants_apart`, which
    is then not called for nothing, and within `capturing`: the rules are the whole process's.
    """
    with _rewriting(_from_where_it_begins):
        yield


def _from_where_it_begins(rule: Any, rewrite: Callable[..., Any]) -> Callable[..., Any]:
    """A rule's method, which declines a node by its operator where the rule's matcher would."""
    is_simple = type(getattr(rule, "_matcher", None)).__name__ == "SimplePatternMatcher"
    begins = next(iter(getattr(getattr(rule, "_target_pattern", None), "output_nodes", ())), None)
    operator = begins.op_identifier() if is_simple and begins is not None else None
    if operator is None:  # another matcher, or a pattern for operators of several names
        return rewrite
    domain, name = operator[:2]

    def try_rewrite(model: Any, graph: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        if node.op_type != name or node.domain != domain:
            return None
        return rewrite(model, graph, node, *args, **kwargs)

    return try_rewrite


@contextlib.contextmanager
def _rewriting(change: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let each rule rewrite, in the block, with what `change` makes of it and of its method."""
    need("onnxscript.rewriter", "onnx")
    with contextlib.ExitStack() as undo:
        for rule in _rules():
            if (rewrite := getattr(rule, "try_rewrite", None)) is not None:
                before = {name: own for name, own in vars(rule).items() if name == "try_rewrite"}
                undo.callback(vars(rule).update, before)
                undo.callback(vars(rule).pop, "try_rewrite", None)
                rule.try_rewrite = change(rule, rewrite)
        yield


def _with_constants_apart(rewrite: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that renames its constants where others than what it replaces read one of that name."""

    def try_rewrite(model: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        delta = rewrite(model, graph, *args, **kwargs)
        for value in () if delta is None else delta.new_initializers:
            known = getattr(graph, "initializers", {}).get(value.name)  # a function has none
            if known is not None and any(node not in delta.match.nodes for node, _ in known.uses()):
                names = (f"{value.name}.{number}" for number in itertools.count(1))
                value.name = next(name for name in names if name not in graph.initializers)
        return delta

    return try_rewrite


@contextlib.contextmanager
def last_match_freed() -> Iterator[None]:
    """Let the rules forget the last model after the block: each keeps a node of it, and so its weights."""
    try:
        yield
    finally:
        for rule in _rules():
            matcher = getattr(rule, "_matcher", None)
            for name in _OF_A_MATCH & getattr(matcher, "__dict__", {}).keys():
                setattr(matcher, name, None)


def _rules() -> tuple[Any, ...]:
    return getattr(sys.modules.get("onnxscript.rewriter"), "_DEFAULT_REWRITE_RULES", ())


def _numbers() -> list[Any]:
    """The numbers in the patterns of all rules."""
    nodes = (node for rule in _rules() for node in getattr(rule, "_target_pattern", ()))
    return [each for node in nodes for each in node.inputs if {*_TOLERANCES} <= vars(each).keys()]
