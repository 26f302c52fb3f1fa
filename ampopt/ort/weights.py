"""Adds and replaces weights (initializers) of an ONNX graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def add_weights(graph: Any, name: str, array: np.ndarray[Any, np.dtype[Any]]) -> str:
    """Add an initializer with this name or, if it is taken, a longer one; returns the name."""
    from onnx import numpy_helper

    taken = {each.name for each in (*graph.initializer, *graph.input)}
    taken.update(result for node in graph.node for result in node.output)
    while name in taken:
        name += "_"
    graph.initializer.append(numpy_helper.from_array(array, name))
    return name


def remove_unread(graph: Any, names: Iterable[str]) -> None:
    """Remove those of these initializers that no node reads and that are not outputs."""
    read = {name for node in graph.node for name in node.input}
    read.update(value.name for value in graph.output)
    unread = set(names) - read
    for each in [each for each in graph.initializer if each.name in unread]:
        graph.initializer.remove(each)
