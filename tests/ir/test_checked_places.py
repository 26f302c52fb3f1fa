"""Where a place may be out of range, PyTorch checks it: also in what a compiler makes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.ir.checked_places import keep_checks
from ampopt.ir.graph import calls, copy_of
from tests.helpers import Model, program_of

IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])

LOOKS: dict[str, Callable[..., Any]] = {
    "embedding": lambda m, i: F.embedding(i, m.table),
    "index": lambda m, i: m.table[i, i - 4],
    "index_select": lambda m, i: m.table.index_select(0, i.reshape(-1)),
    "gather": lambda m, i: m.table.gather(0, i),
    "take": lambda m, i: torch.take(m.table, i),
    "put": lambda m, i: torch.put(m.table, i, torch.ones(2, 3)),
    "index_put": lambda m, i: m.table.index_put((i,), torch.ones(5), accumulate=True),
    "index_add": lambda m, i: m.table.index_add(0, i.reshape(-1), torch.ones(6, 5), alpha=2),
    "index_copy": lambda m, i: m.table.index_copy(0, i.reshape(-1)[:5], torch.ones(5, 5)),
    "index_fill": lambda m, i: m.table.index_fill(0, i.reshape(-1), 2.0),
    "scatter": lambda m, i: m.table.scatter(0, i, torch.ones(2, 3)),
    "scatter of a number": lambda m, i: m.table.scatter(0, i, 2.0),
    "scatter_add": lambda m, i: m.table.scatter_add(0, i, torch.ones(2, 3)),
    "scatter_reduce": lambda m, i: m.table.scatter_reduce(0, i, torch.ones(2, 3), "amax"),
    "unpooling": lambda m, i: F.max_unpool2d(torch.ones(1, 2, 3), i[None], [1, 1], [1, 1]),
}


def model_of(function: Callable[..., Any]) -> Model:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    return Model(function, table=table).eval()


@pytest.mark.parametrize("name", LOOKS)
def test_what_may_be_out_of_range_is_an_operator_of_ours(name: str) -> None:
    model = model_of(LOOKS[name])
    program = program_of(model, IDS)
    module = copy_of(program.graph)
    keep_checks(module, program)
    assert len([n for n in calls(module) if str(n.target).startswith("ampopt.")]) == 1
    assert torch.equal(module(IDS)[0], model(IDS))
    with pytest.raises((IndexError, RuntimeError), match=r"out of|invalid max index"):
        module(IDS + 100)


def test_what_cannot_be_out_of_range_stays() -> None:
    program = program_of(model_of(lambda m, i: m.table[i.clamp(0, 4)]), IDS)
    module = copy_of(program.graph)
    before = [node.target for node in calls(module)]
    keep_checks(module, program)
    assert [node.target for node in calls(module)] == before


def test_a_graph_without_places_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(model_of(lambda m, x: x * 2), torch.ones(2))

    def looks(program: object) -> Tensor:
        raise AssertionError

    monkeypatch.setattr("ampopt.ir.checked_places.record_shapes", looks)
    keep_checks(copy_of(program.graph), program)
