"""Optimizes the Python code between a model's optimized submodules, by TorchDynamo's graphs of it.

Dynamo captures functions, loops and what follows a break as graphs, each with guards on what it depends on
besides its inputs; between them the code runs as Python. It captures before anything is served, in three
calls, and never again: where a guard does not hold (a size that depends on values, another mode), the code
runs as it was.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ampopt.errors import reason_of
from ampopt.ir.capturing import capturing
from ampopt.measure.clocks import synchronize
from ampopt.measure.ledger import Ledger
from ampopt.search.compiled_graph import CompiledGraph, compile_graph, is_weight, size_of
from ampopt.search.options import Options
from ampopt.search.rehearsal import Sandbox
from ampopt.search.trials import Progress
from ampopt.system.interrupts import check_interrupted

LEAST = 0.02
"""Share of a call's time from which on a graph is optimized."""

FEWEST = 4
"""Operators from which on it is: a launch is not worth it for less."""

Call = Callable[..., Any]


class Part:
    """A graph of the model's code; `seconds` is its time in one call of the model."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Keep the inputs' values: later code may write to them."""
        self.graph, self.place = graph, _place_of(graph)
        is_kept = [not isinstance(each, Tensor) or is_weight(each) for each in inputs]
        self.inputs = [
            each if kept else each.detach().clone() for each, kept in zip(inputs, is_kept, strict=True)
        ]
        self.compiled: CompiledGraph | None = None
        self.seconds = 0.0
        self.is_timed = False
        self._weights = {i: (each, each._version) for i, each in enumerate(inputs) if is_weight(each)}

    @property
    def weights(self) -> frozenset[int]:
        """The places of the weights among the inputs: what no call so far has changed, unlike a state."""
        return frozenset(self._weights)

    def __call__(self, *inputs: Any) -> Any:
        """The graph's results."""
        if self.compiled is not None:
            return self.compiled(*inputs)
        for place, (weight, version) in list(self._weights.items()):
            if inputs[place] is not weight or weight._version != version:
                del self._weights[place]
        return self._timed(inputs) if self.is_timed else self.graph(*inputs)

    def settle(self) -> None:
        """Forget what was only needed to optimize it."""
        self.inputs, self._weights = [], {}

    def _timed(self, inputs: tuple[Any, ...]) -> Any:
        device = next((each.device for each in inputs if isinstance(each, Tensor)), torch.device("cpu"))
        synchronize(device)
        began = time.perf_counter()
        outputs = self.graph(*inputs)
        synchronize(device)
        self.seconds += time.perf_counter() - began
        return outputs


class Between:
    """The graphs of the code of a model, whose submodules may be optimized.

    `parts` are those that Dynamo found in one call; `whole_s` is the time of such a call in seconds.
    """

    def __init__(self, call: Callable[[Call], object], model: nn.Module) -> None:
        """`call` calls what it is given as the model is called when it serves, and `model` may change state.

        Raises whatever Dynamo does.
        """
        self.parts: list[Part] = []
        self._model = [model]
        self._function = _own_function(self._model)
        with capturing(), _numbers_vary():
            compiled = torch.compile(self._function, backend=self._collect)
            with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                call(compiled)  # each size gets a graph of its own
            for _ in range(2):  # a number that the model counts becomes a variable when it has changed
                call(compiled)
            self.served: Call = torch._dynamo.run(self._function)
        self.whole_s = self._timed(call)

    def serve(self, model: nn.Module) -> Call:
        """What answers calls with the code of the model, a copy of the one that was captured."""
        self._model[0] = model
        return self.served

    def optimize(
        self, options: Options, seconds: float, progress: Progress, sandbox: Sandbox
    ) -> Iterator[tuple[Part, Ledger | None, str]]:
        """Optimize the graphs that take a part of the call's time, the longest first, within `seconds`.

        Gives each with its report, or the reason why it runs as it was.
        """
        end = time.perf_counter() + seconds
        least_s = LEAST * self.whole_s
        worth = [part for part in self.parts if part.seconds > least_s and size_of(part.graph) >= FEWEST]
        worth.sort(key=lambda part: -part.seconds)
        for index, part in enumerate(worth):
            left = end - time.perf_counter()
            if left <= 0:
                yield part, None, "the time budget was spent"
                continue
            share = left * part.seconds / sum(each.seconds for each in worth[index:])
            mine = options.within(share)
            try:
                with torch.no_grad():
                    given = part.graph, part.inputs, part.weights, mine, progress, sandbox
                    compiled = compile_graph(*given, is_part=True)
            except Exception as error:
                check_interrupted(error)
                yield part, None, reason_of(error)
                continue
            part.compiled = compiled
            yield part, compiled.report, ""
        for part in self.parts:
            part.settle()

    def _collect(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Part:
        part = Part(graph, inputs)
        self.parts.append(part)
        return part

    def _timed(self, call: Callable[[Call], object]) -> float:
        """The time of a call, in which each part takes its own."""
        call(self.served)
        for part in self.parts:
            part.seconds, part.is_timed = 0.0, True
        began = time.perf_counter()
        try:
            call(self.served)
            return time.perf_counter() - began
        finally:
            for part in self.parts:
                part.is_timed = False


def _numbers_vary() -> contextlib.AbstractContextManager[object]:
    """Let Dynamo take a number that a module counts for a variable, as it does with numbers elsewhere."""
    config = torch._dynamo.config
    name = "allow_unspec_int_on_nn_module"
    return config.patch({name: True}) if hasattr(config, name) else contextlib.nullcontext()


def _own_function(model: list[nn.Module]) -> Call:
    """A function that calls the model, with code of its own: Dynamo keeps what it captured by code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model[0](*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _place_of(graph: fx.GraphModule) -> str:
    """Where the graph's code begins: `roi_heads.py:531`."""
    for node in graph.graph.nodes:
        found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
        if node.op.startswith("call_") and found:
            file, line = found[-1]
            return f"{file.rpartition('/')[2]}:{line}"
    return "code without a place"
