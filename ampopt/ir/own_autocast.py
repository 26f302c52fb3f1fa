"""Where a model switches autocast off for some of its calls: their marks, and a graph that heeds them."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from ampopt.ir.settings import autocast_scope

FULL_PRECISION = "full_precision"
"""Key of a node's `meta`: autocast is off for it, so its inputs are converted to FP32.

The value is True, or the dtype that they are converted to.
"""


def own_scope(node: fx.Node, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast is off in the block if the model has switched it off for a call of its graph."""
    return autocast_scope(device, None) if FULL_PRECISION in node.meta else contextlib.nullcontext()


def as_under_autocast(graph: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A graph that does under autocast what the model does: the calls that it marks run without.

    The graph itself where it marks none. The weights are shared.
    """
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    places, without = dict[fx.Node, int](), list[int]()
    for place, (is_marked, nodes) in enumerate(itertools.groupby(calls, _is_marked)):
        places |= dict.fromkeys(nodes, place)
        without += [place] if is_marked else []
    if not without:
        return graph
    divided = split_module(graph, graph, places.__getitem__, keep_original_order=True)
    for place in without:
        name = f"submod_{place}"
        setattr(divided, name, _WithoutAutocast(getattr(divided, name), device))
    return divided


def _is_marked(node: fx.Node) -> bool:
    return FULL_PRECISION in node.meta


class _WithoutAutocast(nn.Module):
    """Runs calls with autocast off, as the model does."""

    def __init__(self, inner: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._inner, self._device = inner, device

    def forward(self, *values: Any) -> Any:
        """The results of the calls."""
        with autocast_scope(self._device, None):
            return self._inner(*values)
