"""Inductor's code in ranges: the names above a launch are its own, whatever prepares it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.traceback import NodeSource

from ampopt.engines.inductor_labels import labelled, name_by_place, name_sources_by_place, names_of

SOURCE = """
def call(self, args):
    x, = args
    args.clear()
    with guard(0):
        set_device(0)
        # Topologically Sorted Source Nodes: [ampopt_at_0], Original ATen: [aten.mean]
        stream0 = get_raw_stream(0)
        kernel_0.run(x, stream=stream0)
        buf0 = empty_strided_cuda((8,))
        # Topologically Sorted Source Nodes: [ampopt_at_1, ampopt_at_0], Original ATen: [aten.relu]
        stream0 = get_raw_stream(0)
        kernel_1.run(x, buf0, stream=stream0)
        del buf0
        kernel_2.run(x)
    return (x, )
"""
"""As versions write it: some ask for the stream again above each launch, below the names."""


class TwoCalls(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.mean(x))


def test_a_launch_has_the_names_above_what_prepares_it() -> None:
    graph = fx.symbolic_trace(TwoCalls())
    first, second = (node.name for node in graph.graph.nodes if node.op == "call_function")
    ran: list[str] = []
    launch = SimpleNamespace(run=lambda *_, **__: ran.append(seen[-1][0]))
    code = made({f"kernel_{at}": launch for at in range(3)})
    seen: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def label(called: str, names: str) -> Iterator[None]:
        seen.append((called, names))
        yield

    with labelled(code, graph, label):
        code.current_callable([torch.ones(1)])
    assert [each for each in seen if each[0].startswith("kernel")] == [
        ("kernel_0", first),
        ("kernel_1", f"{second},{first}"),
        ("kernel_2", ""),
    ]
    assert ran == ["kernel_0", "kernel_1", "kernel_2"]


def made(kernels: dict[str, Any]) -> Any:
    """What stands for a `CompiledFxGraph` whose code launches these kernels."""
    namespace = {
        **kernels,
        "guard": lambda _: contextlib.nullcontext(),
        "set_device": lambda _: None,
        "get_raw_stream": lambda _: 0,
        "empty_strided_cuda": lambda _: torch.empty(8),
    }
    exec(SOURCE, namespace)
    runner = type("Runner", (), {"call": namespace["call"]})()
    return SimpleNamespace(source_code=SOURCE, current_callable=runner.call)


def test_places_are_names_again() -> None:
    graph = fx.symbolic_trace(TwoCalls())
    names = [node.name for node in graph.graph.nodes if node.op == "call_function"]
    assert names_of("ampopt_at_1,ampopt_at_0,ampopt_at_7,other", graph) == ",".join(reversed(names))
    name_by_place(graph)
    assert [n.name for n in graph.graph.nodes if n.op == "call_function"] == ["ampopt_at_0", "ampopt_at_1"]


@pytest.mark.parametrize("copies", [1, 2])
def test_the_source_of_a_traced_node_is_the_one_named_by_place(copies: int) -> None:
    """However often the graph is copied first, with names of the copy's own: torch 2.10 does so on a CPU."""
    graph = fx.symbolic_trace(TwoCalls())
    name_by_place(graph)
    for _ in range(copies):
        graph = fx.Transformer(graph).transform()
    own = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [node.name for node in own] == ["mean", "relu"]
    name_sources_by_place(graph)
    assert [node.meta["from_node"][0].name for node in own] == ["ampopt_at_0", "ampopt_at_1"]


def test_a_traced_node_from_no_place_keeps_its_source() -> None:
    graph = fx.symbolic_trace(TwoCalls())
    first, second = (node for node in graph.graph.nodes if node.op == "call_function")
    first.meta["from_node"] = [NodeSource(second)]
    name_sources_by_place(graph)
    assert first.meta["from_node"][0].name == "relu"
    assert "from_node" not in second.meta
