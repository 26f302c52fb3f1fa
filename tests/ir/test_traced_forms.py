"""A GRU's cell that begins with a constant: frozen TorchScript answers every call as the first."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy import torchscript_file
from ampopt.deploy.torchscript_file import write_torchscript
from ampopt.errors import ExportError
from ampopt.ir.graph import aten, calls
from ampopt.ir.program import Program
from ampopt.ir.traced_forms import graph_to_trace
from ampopt.passes import Script
from tests.helpers import Model, program_of

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def refined(m: Any, x: Tensor) -> Tensor:
    """Slots that are a weight at first, and are refined twice."""
    slots: Tensor = m.slots.expand(3, -1)
    for _ in range(2):
        slots = m.cell(x * slots.softmax(-1), slots)
    return slots


def cell(**options: Any) -> nn.GRUCell:
    return nn.GRUCell(8, 8, **options)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "learned": lambda: Model(lambda m, x: m.cell(x, m.first), cell=cell(), first=torch.randn(3, 8)),
    "without bias": lambda: Model(
        lambda m, x: m.cell(x, m.first), cell=cell(bias=False), first=torch.randn(3, 8)
    ),
    "slots": lambda: Model(refined, cell=cell(), slots=torch.randn(1, 8)),
    "zeros": lambda: Model(lambda m, x: m.cell(x), cell=cell()),
    "given": lambda: Model(lambda m, x: m.cell(x, x * 2), cell=cell()),
    "in float64": lambda: Model(lambda m, x: m.cell(x.double(), m.h), cell=cell().double(), h=X.double()),
}


def program(name: str) -> Program:
    torch.manual_seed(0)
    return program_of(CELLS[name]().eval(), X)


@pytest.mark.parametrize("name", CELLS)
def test_the_form_of_a_cell_is_the_cell(name: str) -> None:
    own = program(name)
    code = own.graph.code
    graph = graph_to_trace(own)
    assert own.graph.code == code
    assert not any(calls(graph, [aten.gru_cell.default]))
    torch.testing.assert_close(graph(X)[0], own.run(X)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CELLS)
def test_every_call_of_an_engine_is_right(name: str) -> None:
    own = program(name)
    made = Script().apply(own).program
    for x in (X, X, -X, X):
        torch.testing.assert_close(made.run(x)[0], own.run(x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CELLS)
def test_every_call_of_a_file_is_right(name: str) -> None:
    own = program(name)
    loaded = torch.jit.load(io.BytesIO(write_torchscript(own, [X], own.run(X), 1e-5)))
    for x in (X, X, -X, X):
        torch.testing.assert_close(loaded([x])[0], own.run(x)[0], rtol=1e-5, atol=1e-5)


def test_a_file_whose_later_calls_are_wrong_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    own = program("learned")
    monkeypatch.setattr(torchscript_file, "graph_to_trace", lambda p: copy.deepcopy(p.graph).eval())
    with pytest.raises(ExportError, match="fails its own self-test"):
        write_torchscript(own, [X], own.run(X), 1e-3)


def test_a_graph_without_a_cell_is_copied_with_its_weights() -> None:
    own = program_of(nn.Linear(8, 8).eval(), X)
    graph = graph_to_trace(own)
    assert graph.code == own.graph.code
    mine = {tensor.data_ptr() for tensor in graph.buffers()}
    assert mine.isdisjoint(tensor.data_ptr() for tensor in own.graph.buffers())
