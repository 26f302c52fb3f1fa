"""Provenance: the places in the user's model that each node comes from; every rewrite keeps it.

A node that replaces several nodes has all their origins: a convolution with a folded normalization has both.
The origins of a weight are those of the calls that read it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import torch
from torch import fx

_KEY = "origins"
_CARRIED = "custom"
"""The part of a node's `meta` that PyTorch hands on when it decomposes a graph, or exports it again."""

_NOT_THE_USERS = (str(Path(torch.__file__).parent) + os.sep, "<eval_with_key>")
"""How files begin that hold no line of the user's: PyTorch's own, and the code of graphs."""

_MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Origin:
    """A place in the user's model; if both fields are empty, the model as a whole."""

    module: str
    """The dotted path of the innermost `nn.Module`; empty for the model itself."""
    source: str
    """The line of the user's code, `resnet.py:92`; empty if unknown."""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.module, self.source) if part)


WHOLE_MODEL = Origin("", "")


def origins_of(node: fx.Node) -> tuple[Origin, ...]:
    """A node's origins; empty if none were recorded, as in a loaded program."""
    own: tuple[Origin, ...] | None = node.meta.get(_KEY)
    return own if own is not None else (node.meta.get(_CARRIED) or {}).get(_KEY, ())


def carry_on(node: fx.Node, *sources: fx.Node) -> None:
    """Add the origins of all `sources` to a node."""
    node.meta[_KEY] = _joined([origins_of(source) for source in sources])


def place_of(node: fx.Node) -> str:
    """The first few origins of a node as text: `layer3.0.conv1, resnet.py:92`; empty if there are none."""
    named = [text for text in map(str, origins_of(node)) if text]
    more = [f"and {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    return "; ".join([*named[:_MOST_NAMED], *more])


def note_exported(module: fx.GraphModule) -> tuple[Origin, ...]:
    """Record the origins of every call of an exported graph; returns the origins of all its calls.

    PyTorch's decompositions pass them on. A node that calls a subgraph has the origins of all its nodes,
    because their calls are inlined in its place.
    """
    found: list[tuple[Origin, ...]] = []
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        blocks = [value for source in node.all_input_nodes if (value := _block(module, source)) is not None]
        found.append(_joined([note_exported(block) for block in blocks]) if blocks else (_exported(node),))
        _hand_on(node, found[-1])
    return _joined(found)


def hand_on(module: fx.GraphModule) -> None:
    """Store every node's origins where they survive PyTorch's export of a graph."""
    for node in module.graph.nodes:
        _hand_on(node, origins_of(node))


def note_borders(module: fx.GraphModule) -> None:
    """Record origins for the nodes of a captured graph that are not calls, and for calls without any.

    Inputs have the model as a whole as origin, weights the calls that read them, and calls without origins
    those of their arguments.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr":
            carry_on(node, *node.users)
        elif node.op == "call_function" and not origins_of(node):
            carry_on(node, *node.all_input_nodes)
        if node.op != "output" and not origins_of(node):
            node.meta[_KEY] = (WHOLE_MODEL,)


def _hand_on(node: fx.Node, origins: tuple[Origin, ...]) -> None:
    node.meta[_CARRIED] = {**(node.meta.get(_CARRIED) or {}), _KEY: origins}


def _joined(parts: list[tuple[Origin, ...]]) -> tuple[Origin, ...]:
    return tuple(dict.fromkeys(origin for part in parts for origin in part))


def _block(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node reads; None where it is anything else."""
    value = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else None


def _exported(node: fx.Node) -> Origin:
    """What `torch.export` noted of a call."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    frames = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    own = [(file, line) for file, line in frames if not file.startswith(_NOT_THE_USERS)]
    module = [path for path, _ in stack.values()][-1:]
    return Origin("".join(module), f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else "")
