"""Runs independent branches of a graph on several streams: the schedule, the waits, the tensors to keep.

`plan` decides and `branched` writes the plan into a graph, as calls on the `Streams` that it is given first:

    fork = streams.fork(2)
    conv2d = aten.conv2d(x, w)
    launch_on = streams.launch_on(1)
    conv2d_1 = aten.conv2d(x, v)
    record = streams.record()
    launch_on_1 = streams.launch_on(0)
    wait = streams.wait(record)
    add = aten.add(conv2d, conv2d_1)
    join = streams.join([conv2d_1], [add])
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.graph import calls, copy_of

MAIN = 0
"""The number of the stream on which a call begins and ends."""

Ended = Mapping[int, int]
"""The number of each stream's operators that have certainly ended: a vector clock."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The stream and the waits of each call of the planned graph."""

    stream: Mapping[fx.Node, int]
    """The stream of every call, `MAIN` or another."""
    waits: Mapping[fx.Node, tuple[fx.Node, ...]]
    """The calls on other streams that a call has to wait for; calls without waits are not in it."""
    held: tuple[fx.Node, ...]
    """The values that must live until the join, because another stream reads them."""

    @property
    def streams(self) -> int:
        """How many streams are used, the main one included."""
        return 1 + max(self.stream.values(), default=MAIN)


def plan(graph: fx.Graph, streams: int) -> Schedule:
    """Spread the calls of a functional graph over at most `streams` streams, in the graph's order.

    A call continues the stream on which one of its inputs was launched last; else it takes a stream that no
    later call will continue, or a new one. A view launches nothing: it has the stream of its base, and its
    readers wait for the base. Inputs and weights exist before the fork, so no call waits for them.
    """
    writer = _writers(graph)
    inputs = {
        node: list(dict.fromkeys(w for n in node.all_input_nodes if (w := writer[n]).op == "call_function"))
        for node in graph.nodes
        if node.op == "call_function" and writer[node] is node
    }
    lengths = _Lengths.of(inputs)
    placed = _Placed(streams, _count_readers(inputs))
    waits: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node, sources in inputs.items():
        ranked = sorted(sources, key=lengths.rank, reverse=True)
        if awaited := placed.place(node, ranked):
            waits[node] = awaited
    stream = {
        node: placed.stream.get(writer[node], MAIN) for node in graph.nodes if node.op == "call_function"
    }
    crossing = [
        read
        for node in inputs
        for read in node.all_input_nodes
        if writer[read].op == "call_function" and stream[read] != stream[node]
    ]
    return Schedule(stream, waits, tuple(dict.fromkeys(crossing)))


class _Placed:
    """What stands on the streams so far."""

    def __init__(self, most: int, unplaced_readers: dict[fx.Node, int]) -> None:
        self._most, self._unplaced_readers = most, unplaced_readers
        self._latest: list[fx.Node | None] = [None]
        self._ended: list[dict[int, int]] = [{}]
        self._ended_with: dict[fx.Node, Ended] = {}
        self._order: dict[fx.Node, int] = {}
        self.stream: dict[fx.Node, int] = {}

    def place(self, node: fx.Node, sources: list[fx.Node]) -> tuple[fx.Node, ...]:
        """Choose the stream of the next call, whose inputs are `sources`; return what it has to wait for.

        An event stands for its stream's earlier operators too, and for all that those waited for. So the
        sources that were launched last are looked at first, and those that have ended with them are skipped.
        """
        chosen = self._choose(sources)
        if chosen == len(self._latest):
            self._latest.append(None)
            self._ended.append({})
        ended, waits = self._ended[chosen], []
        for source in sorted(sources, key=self._order.__getitem__, reverse=True):
            if not self._has_ended(source, ended):
                waits.append(source)
                _merge(ended, self._ended_with[source])
        ended[chosen] = ended.get(chosen, 0) + 1
        self.stream[node], self._order[node], self._latest[chosen] = chosen, len(self._order), node
        self._ended_with[node] = dict(ended)
        for source in sources:
            self._unplaced_readers[source] -= 1
        return tuple(waits)

    def _choose(self, sources: list[fx.Node]) -> int:
        """The stream for a call; the first of `sources` is the one to be continued rather than others."""
        for source in sources:
            if self._latest[self.stream[source]] is source:
                return self.stream[source]
        by_then: dict[int, int] = {}
        for source in sources:
            _merge(by_then, self._ended_with[source])
        free = [s for s, latest in enumerate(self._latest) if not self._has_readers_to_come(latest)]
        for stream in free:
            latest = self._latest[stream]
            if latest is None or self._has_ended(latest, by_then):
                return stream
        if len(self._latest) < self._most:
            return len(self._latest)
        if free:
            return free[0]
        return self.stream[max(sources, key=self._order.__getitem__)] if sources else MAIN

    def _has_readers_to_come(self, latest: fx.Node | None) -> bool:
        return latest is not None and self._unplaced_readers[latest] > 0

    def _has_ended(self, node: fx.Node, ended: Ended) -> bool:
        stream = self.stream[node]
        return ended.get(stream, 0) >= self._ended_with[node][stream]


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """The longest paths through each call, in operators: what is on the critical path is not to wait."""

    before: Mapping[fx.Node, int]
    after: Mapping[fx.Node, int]

    @classmethod
    def of(cls, inputs: Mapping[fx.Node, list[fx.Node]]) -> _Lengths:
        """For calls in the graph's order and the calls that each of them reads."""
        before: dict[fx.Node, int] = {}
        after = dict.fromkeys(inputs, 0)
        for node, sources in inputs.items():
            before[node] = _cost(node) + max((before[source] for source in sources), default=0)
        for node, sources in reversed(list(inputs.items())):
            after[node] += _cost(node)
            for source in sources:
                after[source] = max(after[source], after[node])
        return cls(before, after)

    def rank(self, node: fx.Node) -> tuple[int, int]:
        """By the path that is still to come, then by the path behind: the input that comes last."""
        return self.after[node], self.before[node]


def _merge(ended: dict[int, int], also: Ended) -> None:
    for stream, count in also.items():
        ended[stream] = max(ended.get(stream, 0), count)


def _count_readers(inputs: Mapping[fx.Node, Iterable[fx.Node]]) -> dict[fx.Node, int]:
    readers = dict.fromkeys(inputs, 0)
    for sources in inputs.values():
        for source in sources:
            readers[source] += 1
    return readers


def _writers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The node that computes each node's value: for a view, what it views; else the node itself."""
    writer: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        writer[node] = writer[node.all_input_nodes[0]] if _is_view(node) else node
    return writer


def _is_view(node: fx.Node) -> bool:
    """Whether a call surely launches nothing: an operator that gives its only tensor another shape.

    Operators that are composed of others promise a view and may copy (`reshape`), so they do not count.
    """
    if node.target is operator.getitem:
        return True
    overload = node.target
    return (
        isinstance(overload, torch._ops.OpOverload)
        and overload.namespace == "aten"
        and not overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        and _may_be_view(overload)
        and len(node.all_input_nodes) == 1
    )


def _may_be_view(overload: torch._ops.OpOverload) -> bool:
    results = overload._schema.returns
    return bool(results) and all(result.alias_info is not None for result in results)


def _cost(node: fx.Node) -> int:
    overload = node.target
    return 0 if isinstance(overload, torch._ops.OpOverload) and _may_be_view(overload) else 1


def branched(module: fx.GraphModule, schedule: Schedule) -> fx.GraphModule:
    """A copy of the planned graph with fork, waits and join; it takes the `Streams` as its first input.

    FX's code releases a value after its last reader. The join reads the held values, so that these, and no
    others, live until the streams have joined.
    """
    planned, written = module.graph, copy_of(module)
    graph = written.graph
    copy = dict(zip(planned.nodes, graph.nodes, strict=True))
    with graph.inserting_before(next(iter(graph.nodes))):
        streams = graph.placeholder("streams")

    def tell(name: str, *args: Any) -> fx.Node:
        return graph.call_method(name, (streams, *args))

    awaited = {source for sources in schedule.waits.values() for source in sources}
    recorded: dict[fx.Node, fx.Node] = {}
    current = MAIN
    for index, node in enumerate(calls(module)):
        with graph.inserting_before(copy[node]):
            if index == 0:
                tell("fork", schedule.streams)
            if not _is_view(node) and schedule.stream[node] != current:
                current = schedule.stream[node]
                tell("launch_on", current)
            for source in schedule.waits.get(node, ()):
                tell("wait", recorded[source])
        if node in awaited:
            with graph.inserting_after(copy[node]):
                recorded[node] = tell("record")
    output = graph.output_node()
    with graph.inserting_before(output):
        tell("join", [copy[node] for node in schedule.held], list(output.all_input_nodes))
    graph.lint()
    return fx.GraphModule(written, graph)
