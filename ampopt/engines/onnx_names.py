"""Names of weights that no value in an ONNX model has."""

from __future__ import annotations

from torch import Tensor, fx, nn

HOME = "weights"
"""The name of the module that weights without a module are moved into."""


def move_weights_apart(module: fx.GraphModule) -> None:
    """Move weights that are the graph's own into a module, in place, so that their names have a dot.

    The exporter names values after nodes and weights. A weight `arange`, and the result of an operator
    `arange` inside of an `EmbeddingBag`, had the same name: the export failed, or was no valid model. The
    names of nodes have no dots.
    """
    home, holder = HOME, nn.Module()
    while hasattr(module, home):
        home += "_"
    own = [n for n in module.graph.nodes if n.op == "get_attr" and "." not in n.target]
    for name in dict.fromkeys(str(node.target) for node in own):
        weight = getattr(module, name)
        delattr(module, name)
        if isinstance(weight, nn.Parameter):
            holder.register_parameter(name, weight)
        elif isinstance(weight, Tensor):
            holder.register_buffer(name, weight)
        else:
            holder.add_module(name, weight)  # a graph of its own
    for node in own:
        node.target = f"{home}.{node.target}"
    if own:
        module.add_module(home, holder)
        module.recompile()
