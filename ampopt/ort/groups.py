"""Merges narrow groups of grouped convolutions, so that they fill ONNX Runtime's channel blocks.

On a CPU, ONNX Runtime computes a grouped convolution in blocks only if each group has whole blocks of
channels; else it reorders the numbers and computes group by group. Merged groups, with zero weights between
them, are wide enough: the sum of finite numbers is the same, with more multiplications by zero. On two cores
a convolution of ResNeXt-50 with 4 channels a group takes 0.8 ms when merged, and 1.1 to 1.5 ms with its
reorderings otherwise; that is a fiftieth of the whole network, which only a profile shows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from ampopt.errors import first_line
from ampopt.ort.blocked import block_size
from ampopt.ort.options import SessionOptions
from ampopt.ort.own_convolutions import with_own
from ampopt.ort.own_operators import own_library
from ampopt.ort.padding import with_padded_groups
from ampopt.ort.profile import named, node_seconds, optimized
from ampopt.ort.session import Array
from ampopt.ort.weights import add_weights, remove_unread
from ampopt.system.native import CompilerError

logger = logging.getLogger("ampopt")


def with_merged_groups(model: bytes) -> bytes | None:
    """The model with narrow groups merged into whole blocks, some padded for that; None if there are none."""
    from onnx import load_from_string, numpy_helper

    block = block_size()
    found = load_from_string(with_padded_groups(model, block) or model)
    weights = {each.name: each for each in found.graph.initializer}
    replaced = list[str]()
    for node in found.graph.node:
        group = next((each for each in node.attribute if each.name == "group"), None)
        if node.op_type != "Conv" or group is None or node.input[1] not in weights:
            continue
        weight = numpy_helper.to_array(weights[node.input[1]])
        count = _to_merge(weight, group.i, block)
        if count > 1:
            replaced.append(node.input[1])
            wide = merged(weight, group.i, count)
            node.input[1] = add_weights(found.graph, f"{node.input[1]}_merged", wide)
            group.i //= count
    remove_unread(found.graph, replaced)
    data: bytes = found.SerializeToString()
    return data if replaced else None


def merged(weight: Array, groups: int, count: int) -> Array:
    """Weights of a convolution with `groups`, after merging every `count` groups into one.

    [filters, channels, height, width] → [filters, count * channels, height, width]: filter f has its own
    group's channels, at position (f // (filters / groups)) % count, and zeros elsewhere.
    """
    filters, channels = weight.shape[:2]
    wide: Array = np.zeros((filters, count, channels, *weight.shape[2:]), weight.dtype)
    each = np.arange(filters)
    wide[each, each // (filters // groups) % count] = weight
    return wide.reshape(filters, count * channels, *weight.shape[2:])


def is_quicker_merged(model: bytes, options: SessionOptions, arrays: Sequence[Array]) -> bool:
    """Whether grouped convolutions and reorderings are faster with merged groups, by a profile of each model.

    Merged ones are computed by `narrow_groups` where that is faster still. Raises the SessionError of a
    session.
    """
    wide = with_merged_groups(model)
    if wide is None:
        return False
    plain, graph = (named(optimized(each, options)) for each in (model, wide))
    unoptimized = options.unoptimized()
    before, after = (_concerned(each, unoptimized, arrays) for each in (plain, graph))
    narrow = _narrow(graph, unoptimized, arrays)
    return sum(before.values()) > sum(min(each, narrow.get(name, each)) for name, each in after.items())


def _concerned(graph: bytes, options: SessionOptions, arrays: Sequence[Array]) -> dict[str, float]:
    """The seconds of every grouped convolution and reordering in a graph as ONNX Runtime has optimized it."""
    from onnx import load_from_string

    seconds = node_seconds(graph, options, arrays)
    return {
        node.name: seconds[node.name] for node in load_from_string(graph).graph.node if _is_concerned(node)
    }


def _narrow(graph: bytes, options: SessionOptions, arrays: Sequence[Array]) -> dict[str, float]:
    """The seconds of every node where merged groups are computed as narrow ones; none without a compiler."""
    try:
        return node_seconds(with_own(graph, options, "narrow"), options, arrays, library=own_library())
    except CompilerError as missing:
        logger.info("ampopt: merged groups are not computed as narrow ones: %s", first_line(missing))
        return {}


def _is_concerned(node: Any) -> bool:
    groups = max((each.i for each in node.attribute if each.name == "group"), default=1)
    return groups > 1 or node.op_type in ("ReorderInput", "ReorderOutput")


def _to_merge(weight: Any, groups: int, block: int) -> int:
    """How many groups make whole blocks; 1: they are, or cannot be, or have a channel each."""
    filters, channels = weight.shape[0] // groups, weight.shape[1]
    if weight.ndim != 4 or filters == channels == 1:
        return 1
    fitting = (n for n in range(1, groups + 1) if groups % n == 0)
    return next((n for n in fitting if n * filters % block == 0 and n * channels % block == 0), 1)
