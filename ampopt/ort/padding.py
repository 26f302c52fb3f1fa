"""Pads grouped convolutions with groups of zeros, so that their groups can be merged into whole blocks.

ONNX Runtime pads the channels of a plain convolution to whole blocks by itself, but not those of groups: of
RegNet-Y 400MF's widths 48, 104, 208 and 440 two are no multiple of 16, and their grouped convolutions and
what is around them are computed in the plain layout between reorderings. Padded, they stay in blocks
(`groups`, `blocked`).

Correct because: the channels that are added lie between convolutions. Those before them compute zeros there
(weights and bias 0), operators in between work on each channel by itself and are finite at zero, and the
convolutions behind them multiply by 0. An infinity or NaN may reach further results through these zeros.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ampopt.ort.blocked import ELEMENTWISE
from ampopt.ort.session import Array
from ampopt.ort.weights import add_weights, remove_unread

POOLS = {"GlobalAveragePool", "AveragePool", "MaxPool", "ReduceMean"}

CHANNEL_BY_CHANNEL = (ELEMENTWISE - {"Exp", "Sqrt"}) | POOLS
"""Operators whose results in a channel are of this channel only, and finite where it is finite."""

MOST_ADDED = 0.25
"""The most groups that are added to a convolution, as a share of those that it has."""


def with_padded_groups(model: bytes, block: int) -> bytes | None:
    """The model with grouped convolutions padded to whole blocks of channels; None where there are none."""
    from onnx import load_from_string

    padding = _Padding(load_from_string(model), block)
    return padding.padded()


def groups_to_add(groups: int, filters: int, channels: int, block: int) -> int:
    """How many groups of so many filters and channels are missing to whole blocks; 0 if none or too many."""
    if filters == channels == 1:
        return 0
    fits = (n for n in itertools.count(groups) if n * filters % block == n * channels % block == 0)
    missing = next(fits) - groups
    return missing if missing <= MOST_ADDED * groups else 0


@dataclasses.dataclass(frozen=True)
class _Conv:
    """A convolution with constant weights [filters, channels of a group, …]."""

    node: Any
    weight: Array
    groups: int

    @property
    def filters(self) -> int:
        return int(self.weight.shape[0])

    @property
    def channels(self) -> int:
        return int(self.weight.shape[1]) * self.groups

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.channels == self.filters


Widths = dict[str, tuple[int, int]]
"""Tensors with padded channels: how many they have, and will have."""


class _Padding:
    """A model while it is padded."""

    def __init__(self, model: Any, block: int) -> None:
        from onnx import helper, numpy_helper

        self.model, self.graph, self.block = model, model.graph, block
        self.numbers = {each.name: numpy_helper.to_array(each) for each in self.graph.initializer}
        self.ends = {value.name for value in (*self.graph.input, *self.graph.output)}
        self.producer: dict[str, Any] = {}
        self.readers: dict[str, list[Any]] = defaultdict(list)
        self.convs: dict[str, _Conv] = {}
        """By the name of their results."""
        for node in self.graph.node:
            self.producer.update(dict.fromkeys(node.output, node))
            for name in dict.fromkeys(node.input):
                self.readers[name].append(node)
            if node.op_type == "Conv" and not node.domain and self._is_constant(node.input[1:]):
                groups = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "group"), 1)
                self.convs[node.output[0]] = _Conv(node, self.numbers[node.input[1]], groups)

    def padded(self) -> bytes | None:
        """See `with_padded_groups`."""
        widths: Widths = {}
        for conv in self.convs.values():
            if (added := self._missing(conv)) and conv.node.output[0] not in widths:
                tried = dict(widths)
                if self._pads_around(conv, added, tried):
                    widths = tried
        if not widths:
            return None
        for conv in self.convs.values():
            self._widen(conv, widths)
        for value in self.graph.value_info:
            if value.name in widths:
                value.type.tensor_type.shape.dim[1].dim_value = widths[value.name][1]
        data: bytes = self.model.SerializeToString()
        return data

    def _missing(self, conv: _Conv) -> int:
        if conv.groups == 1 or conv.weight.ndim != 4:
            return 0
        return groups_to_add(conv.groups, conv.filters // conv.groups, conv.weight.shape[1], self.block)

    def _pads_around(self, conv: _Conv, added: int, widths: Widths) -> bool:
        """Whether a convolution can have more groups; then `widths` has all that becomes wider for it."""
        groups = conv.groups + added
        inside = conv.channels, conv.channels // conv.groups * groups
        outside = conv.filters, conv.filters // conv.groups * groups
        ends = (conv.node.input[0], inside), (conv.node.output[0], outside)
        return all(self._pads(name, width, widths) for name, width in ends)

    def _pads(self, name: str, width: tuple[int, int], widths: Widths) -> bool:
        """Whether a tensor can be wider, and then all that must be as wide for it."""
        if name in widths:
            return widths[name] == width
        if name in self.ends or name not in self.producer:
            return False
        widths[name] = width
        concerned = [self.producer[name], *self.readers[name]]
        return all(self._takes(node, name, width, widths) for node in concerned)

    def _takes(self, node: Any, name: str, width: tuple[int, int], widths: Widths) -> bool:
        """Whether a node, which makes or reads the tensor, can do so where that is wider."""
        if node.output[0] in self.convs:
            return self._conv_takes(self.convs[node.output[0]], name, width, widths)
        if node.domain or node.op_type not in CHANNEL_BY_CHANNEL or len(node.output) > 1:
            return False
        if node.op_type == "ReduceMean" and not self._is_of_pixels(node):
            return False
        operands = node.input[:1] if node.op_type == "ReduceMean" else node.input
        others = [each for each in operands if each and not self._is_number(each)]
        return all(self._pads(each, width, widths) for each in (*others, node.output[0]))

    def _conv_takes(self, conv: _Conv, name: str, width: tuple[int, int], widths: Widths) -> bool:
        if name not in (conv.node.input[0], conv.node.output[0]):
            return False  # its weights or bias
        if conv.groups == 1:
            is_result = name == conv.node.output[0]
            return width[0] == (conv.filters if is_result else conv.channels)
        added = width[1] - width[0] if conv.is_depthwise else self._missing(conv)
        return added > 0 and self._pads_around(conv, added, widths)

    def _is_constant(self, names: Iterable[str]) -> bool:
        return all(name in self.numbers for name in names if name)

    def _is_number(self, name: str) -> bool:
        return name in self.numbers and self.numbers[name].size == 1

    def _is_of_pixels(self, node: Any) -> bool:
        """Whether a mean is over the height, the width or both, which stay as dimensions of size 1."""
        from onnx import helper

        has = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        axes = has.get("axes", self.numbers.get(node.input[1], []) if len(node.input) > 1 else [])
        over = {int(axis) % 4 for axis in axes}
        return has.get("keepdims", 1) == 1 and bool(over) and over <= {2, 3}

    def _widen(self, conv: _Conv, widths: Mapping[str, tuple[int, int]]) -> None:
        """Give a convolution the weights of its wider operands: zeros."""
        node = conv.node
        channels = _added(node.input[0], widths)
        filters = _added(node.output[0], widths)
        if channels == filters == 0:
            return
        if conv.groups > 1:
            groups = next(each for each in node.attribute if each.name == "group")
            groups.i += channels // conv.weight.shape[1]
            channels = 0
        pad = [(0, filters), (0, channels), *[(0, 0)] * (conv.weight.ndim - 2)]
        self._replace(node, 1, np.pad(conv.weight, pad))
        if filters and len(node.input) > 2 and node.input[2]:
            self._replace(node, 2, np.pad(self.numbers[node.input[2]], (0, filters)))

    def _replace(self, node: Any, place: int, array: Array) -> None:
        before = node.input[place]
        node.input[place] = add_weights(self.graph, f"{before}_padded", array)
        remove_unread(self.graph, [before])


def _added(name: str, widths: Mapping[str, tuple[int, int]]) -> int:
    before, after = widths.get(name, (0, 0))
    return after - before
