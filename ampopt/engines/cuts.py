"""Where a graph can be cut in pieces: little crosses there, and it lies in memory as a border can tell."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from ampopt.ir.casting import is_product
from ampopt.ir.program import CHANNELS_LAST, Border

LEAST_CALLS = 30
"""Calls in a piece: for fewer the fixed time of a compilation outweighs what the pieces save."""

MOST_CROSSING = 3
"""Tensors that may cross a cut, beside the program's inputs; one for each `LEAST_CALLS` in larger pieces.

What an unrolled loop reads in each round crosses all cuts: seven tensors in RAFT's 1,286 calls, of which one
process compiled for 36 s beside an H200.
"""

MOST_UNEVEN = 3 * LEAST_CALLS
"""Calls by which a cut may be away from where the pieces are even, to have fewer tensors cross it."""


def cuts_of(whole: fx.GraphModule, count: int, until: int | None = None) -> list[int]:
    """The places in the list of nodes before which to cut, in order; fewer than asked for, or none.

    `until`: only what is before that place is cut into `count` pieces.
    """
    nodes = list(whole.graph.nodes)
    varying = varying_in(nodes)
    done = list(itertools.accumulate(int(node.op == "call_function") for node in nodes[:until]))
    most = max(MOST_CROSSING, done[-1] // count // LEAST_CALLS)
    good = {
        place: crossing
        for place, crossing in crossings(nodes)
        if place < len(done)
        and len(crossing) <= most
        and varying.issuperset(crossing)  # what is constant is folded
        if may_cross(crossing, nodes)
    }
    cuts: list[int] = []
    for part in range(1, count):
        ideal, reach = part * done[-1] / count, min(done[-1] / count / 2, MOST_UNEVEN)
        near = [place for place in good if abs(done[place] - ideal) < reach and place not in cuts]
        if near:
            cuts.append(
                min(near, key=lambda p: (len(good[p]), not is_product(nodes[p]), abs(done[p] - ideal)))
            )
    return sorted(cuts)


def varying_in(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on the inputs: the others are constants, which a compiler folds."""
    varying = set[fx.Node]()
    for node in nodes:
        if node.op == "placeholder" or varying.intersection(node.all_input_nodes):
            varying.add(node)
    return varying


def crossings(nodes: Sequence[fx.Node]) -> Iterator[tuple[int, list[fx.Node]]]:
    """For each place before a call: the results of calls before it that calls from there on read."""
    places = {node: place for place, node in enumerate(nodes)}
    last = {
        node: max((places[user] for user in node.users if user.op != "output"), default=-1)
        for node in nodes
        if node.op == "call_function"
    }
    alive: list[fx.Node] = []
    for place, node in enumerate(nodes):
        if node.op == "call_function":
            alive = [each for each in alive if last[each] >= place]
            if alive:
                yield place, list(alive)
            alive.append(node)


def may_cross(crossing: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> bool:
    """Whether these are tensors with memory of their own, in an order that a border can keep."""
    values = [node.meta.get("val") for node in crossing]
    if not all(_is_plain(value) for value in values):
        return False
    inputs = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    places = [v.untyped_storage()._cdata for v in (*values, *inputs) if isinstance(v, Tensor)]
    return all(places.count(place) == 1 for place in places[: len(values)])


def _is_plain(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return has_strides(border_of(value).convert(value), value.stride())


@dataclasses.dataclass(frozen=True)
class Ordered(Border):
    """A border for tensors that lie in memory in another order of their dimensions.

    After a convolution whose pixels become tokens, the sum of a whole network may lie like this: XCiT's graph
    had no cut without it.
    """

    order: tuple[int, ...] = ()

    def convert(self, tensor: Tensor) -> Tensor:
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        return super().convert(tensor.permute(self.order)).permute(places)


def border_of(value: Tensor) -> Border:
    """The border that keeps a tensor as it lies in memory, where one can: it may have gaps."""
    last = CHANNELS_LAST.get(value.dim())
    if last is not None and value.is_contiguous(memory_format=last) and not value.is_contiguous():
        return Border(value.dtype, last)
    order = tuple(sorted(range(value.dim()), key=lambda place: value.stride()[place], reverse=True))
    if value.is_contiguous() or not value.permute(order).is_contiguous():
        return Border(value.dtype)
    return Ordered(value.dtype, order=order)


def has_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides where they matter."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(mine == its for size, mine, its in pairs if size > 1)
