"""Streams without a GPU: what is launched runs at once, and vector clocks tell what CUDA could reorder.

Every operator is numbered on its stream. A stream's clock says of each stream how many operators have surely
ended before what it launches next. An access to memory whose last writer is not among them is a race; so is
memory that is freed, hence open to its own stream's next operator, before all accesses to it are among them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampopt.engines.branches import MAIN

Clock = dict[int, int]


class _Block:
    """Memory of one stream, and who wrote and used it."""

    def __init__(self, stream: int | None) -> None:
        self.stream, self.writer = stream, (MAIN, 0)
        self.used: Clock = {}


class SimulatedStreams(TorchDispatchMode):
    """`Streams` that run on a CPU; a context for one call. `races` is what could have gone wrong on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.races: list[str] = []
        self.handed_over: list[Tensor] = []
        self._current = MAIN
        self._clocks: list[Clock] = [{}]
        self._blocks: dict[int, _Block] = {}

    def fork(self, count: int) -> None:
        self._clocks = [dict(self._clocks[MAIN]) for _ in range(count)]

    def launch_on(self, stream: int) -> None:
        assert stream != self._current, "a switch to the current stream"
        self._current = stream

    def record(self) -> Clock:
        return dict(self._clocks[self._current])

    def wait(self, event: Clock) -> None:
        _merge(self._clocks[self._current], event)

    def join(self, held: Sequence[object], outputs: Sequence[Tensor]) -> None:
        for clock in self._clocks:
            _merge(self._clocks[MAIN], clock)
        for clock in self._clocks:
            _merge(clock, self._clocks[MAIN])
        self._current = MAIN
        self.handed_over = list(outputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if not schema.is_mutable and all(r.alias_info is not None for r in schema.returns):
            return result  # a view: nothing is launched
        clock, current = self._clocks[self._current], self._current
        clock[current] = clock.get(current, 0) + 1
        for block in self._blocks_of((args, kwargs), None):
            self._use(block, func)
            if schema.is_mutable:
                block.writer = (current, clock[current])
        for block in self._blocks_of(result, current):
            self._use(block, func)
            block.writer = (current, clock[current])
        return result

    def _use(self, block: _Block, func: object) -> None:
        clock, (stream, count) = self._clocks[self._current], block.writer
        if clock.get(stream, 0) < count:
            self.races.append(f"{func} on {self._current} may come before its input on {stream}")
        block.used[self._current] = clock[self._current]

    def _blocks_of(self, values: object, stream: int | None) -> Iterator[_Block]:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._blocks:
                    self._blocks[storage._cdata] = _Block(stream)
                    weakref.finalize(storage, self._freed, storage._cdata)
                yield self._blocks[storage._cdata]

    def _freed(self, key: int) -> None:
        block = self._blocks.pop(key)
        if block.stream is None:
            return  # an input or a weight: its owner lets go of it after the call
        clock = self._clocks[block.stream]
        for stream, count in block.used.items():
            if clock.get(stream, 0) < count:
                self.races.append(f"memory of {block.stream} is free while {stream} uses it")


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in list(other.items()):
        clock[stream] = max(clock.get(stream, 0), count)


def run_simulated(module: torch.fx.GraphModule, *inputs: Tensor) -> tuple[list[Tensor], list[str]]:
    """The outputs of a graph that `branches.branched` wrote, and its races."""
    with SimulatedStreams() as streams:
        outputs = list(module(streams, *inputs))
    handed_over = [id(t) for t in streams.handed_over]
    assert {id(t) for t in outputs} == set(handed_over), "the join was not told about every output"
    return outputs, streams.races
