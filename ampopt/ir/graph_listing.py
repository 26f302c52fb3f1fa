"""A graph as lines to read: each call with its arguments, and where in the user's model it comes from."""

from __future__ import annotations

import textwrap
from typing import Any

from torch import fx

from ampopt.ir.origin import place_of

LONGEST = 110
"""Characters of a call; what is longer is shortened."""


def listed(module: fx.GraphModule) -> tuple[str, ...]:
    """`relu_1 = relu(conv2d_1)  # layer1.relu, resnet.py:93`: inputs, calls and results, without weights."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name} = input")
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        elif node.op != "get_attr":
            lines.append(_call(node))
    return tuple(lines)


def _call(node: fx.Node) -> str:
    operator = str(getattr(node.target, "overloadpacket", getattr(node.target, "__name__", node.target)))
    given = [*map(_text, node.args), *(f"{name}={_text(value)}" for name, value in node.kwargs.items())]
    call = f"{node.name} = {operator.removeprefix('aten.')}({', '.join(given)})"
    place = place_of(node)
    return textwrap.shorten(call, LONGEST, placeholder=" …") + (f"  # {place}" if place else "")


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
