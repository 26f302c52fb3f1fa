"""The nodes of a program that ONNX Runtime runs, with their times and what of the graph they compute.

ONNX Runtime fuses nodes and adds some that only change the layout. The values between them keep their names:
a node computes what leads from its inputs to its result in the model as it was exported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ampopt.engines.onnx_graph import origins_of_values
from ampopt.engines.onnx_program import for_onnx_runtime, plain_model
from ampopt.ir.origin import Origin
from ampopt.ir.program import Program
from ampopt.ir.unmarked import array_of
from ampopt.ort.knobs import start_options
from ampopt.ort.options import CPU, SessionOptions
from ampopt.ort.profile import named, node_seconds
from ampopt.ort.rewrites import Rewrites, rewritten_model

Row = tuple[str, float, tuple[str, ...], tuple[Origin, ...]]
"""An operator's kind and time in seconds, the values that it computes, and their origins."""


def node_parts(program: Program) -> list[Row]:
    """Every node of ONNX Runtime's graph in order. Raises LookupError for a program of another recipe."""
    import onnx

    entered = tuple(b.convert(t) for b, t in zip(program.entry, program.examples, strict=True))
    model = for_onnx_runtime(plain_model(program.graph, entered))
    graph, options, library = rewritten_model(model, *_chosen(program))
    arrays = [array_of(tensor) for tensor in entered]
    seconds = node_seconds(named(graph), options, arrays, library=library)
    before, after = onnx.load_from_string(model).graph, onnx.load_from_string(graph).graph
    origins = origins_of_values(program.graph, entered)
    origins |= _of_outputs(program, before, origins)
    computed = computed_values(before.node, after.node)
    rows: list[Row] = []
    for node in after.node:
        values = computed[node.output[0]]
        places = dict.fromkeys(origin for value in values for origin in origins.get(value, ()))
        rows.append((node.op_type, seconds.get(node.output[0], 0.0), values, tuple(places)))
    return rows


def _chosen(program: Program) -> tuple[SessionOptions, Rewrites]:
    """The options and rewrites of the recipe."""
    session = next((s for step in program.recipe if (s := getattr(step, "session", None)) is not None), None)
    if session is None:
        raise LookupError("the recipe does not tell ONNX Runtime's options")
    stored = {name: json.loads(value) for name, value in session}
    rewrites = Rewrites.taken_from(stored)
    return (SessionOptions.from_dict(stored) if stored else start_options(CPU)), rewrites


def _of_outputs(
    program: Program, graph: Any, origins: Mapping[str, tuple[Origin, ...]]
) -> dict[str, tuple[Origin, ...]]:
    """The origins of the model's outputs, which have names of their own."""
    returned: Any = program.graph.graph.output_node().args[0]
    return {
        value.name: origins[node.name]
        for value, node in zip(graph.output, returned, strict=True)
        if node.name in origins
    }


def computed_values(before: Iterable[Any], after: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    """For each node of a graph, by its first result, the values that it computes of the graph as it was.

    A node that only changes the layout has the value that it changes, or those of its reader or source. What
    ONNX Runtime fused into a node and whose name it dropped, an activation, comes after what the node has.
    """
    makers = {value: node for node in before for value in node.output if value}
    nodes = list(after)
    result = {node.output[0]: _known(node, makers) for node in nodes}
    ends = {value for node in nodes if not _is_layout(node) for value in result[node.output[0]]}
    found: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        own = result[node.output[0]]
        found[node.output[0]] = own if _is_layout(node) else _leading_to(own, node.op_type, makers, ends)
    _add_the_rest(makers, found)
    _from_beside(nodes, found)
    return found


_RENAMED = re.compile(r"(_nchwc|_blocked|_weight)_*\Z")
"""What ONNX Runtime, and `ort.blocked`, add to the name of a result whose layout they change."""


def _known(node: Any, makers: Mapping[str, Any]) -> tuple[str, ...]:
    """The results of a node that the graph had before; ONNX Runtime may keep the name in the node's alone."""
    values = [value for value in node.output if value in makers]
    return tuple(values or [name for name in (_RENAMED.sub("", node.name),) if name in makers])


def _is_layout(node: Any) -> bool:
    return str(node.op_type).startswith("Reorder")


def _leading_to(
    own: Sequence[str], kind: str, makers: Mapping[str, Any], ends: Container[str]
) -> tuple[str, ...]:
    """The values that lead to a node's own ones from what other nodes compute, in order.

    What is fused into a convolution comes after it: before an operator of the node's `kind` nothing is its.
    """
    values: dict[str, None] = {}
    waiting = list(own)
    while waiting:
        value = waiting.pop()
        if value not in values:
            values[value] = None
            inputs = () if makers[value].op_type == kind else makers[value].input
            waiting += [each for each in inputs if each in makers and each not in ends]
    return tuple(reversed(values))


def _add_the_rest(makers: Mapping[str, Any], found: dict[str, tuple[str, ...]]) -> None:
    """Give the values that no node has to that which computes what they are made of."""
    owner = {value: name for name, values in found.items() for value in values}
    for value, maker in makers.items():  # in the order of the graph
        source = next((owner[each] for each in maker.input if each in owner), None)
        if value not in owner and source is not None:
            owner[value] = source
            found[source] += (value,)


def _from_beside(nodes: Sequence[Any], found: dict[str, tuple[str, ...]]) -> None:
    """Give nodes without values those of their reader, or else of their source."""
    readers = {value: node.output[0] for node in reversed(nodes) for value in node.input}
    for node in reversed(nodes):
        if not found[node.output[0]]:
            read_by = (readers.get(value, "") for value in node.output)
            found[node.output[0]] = next((each for n in read_by if (each := found.get(n, ()))), ())
    first = {value: node.output[0] for node in nodes for value in node.output}
    for node in nodes:
        if not found[node.output[0]]:
            sources = (found[first[value]] for value in node.input if value in first)
            found[node.output[0]] = next((each for each in sources if each), ())
