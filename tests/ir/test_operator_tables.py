"""A capture looks through PyTorch's operators once, and finds those that were registered since the last."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.capturing import capturing
from ampopt.ir.operator_tables import TABLES
from tests.helpers import Model

FIND = "_materialize_cpp_cia_ops"


@pytest.fixture
def tables() -> ModuleType:
    found = pytest.importorskip(TABLES)
    assert isinstance(found, ModuleType)
    return found


def exported(forward: nn.Module) -> torch.export.ExportedProgram:
    found: torch.export.ExportedProgram = torch.export.export(
        forward, (torch.ones(2, 3),)
    ).run_decompositions()
    return found


def test_they_are_looked_through_once_in_a_capture(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = []
    find = getattr(tables, FIND)
    monkeypatch.setattr(tables, FIND, lambda: times.append(find()))
    with capturing():
        exported(nn.Linear(3, 3))
        exported(nn.Linear(3, 3))
    assert len(times) == 1
    exported(nn.Linear(3, 3))
    assert len(times) > 2


def test_the_function_is_as_it_was_after_it(tables: ModuleType) -> None:
    before = getattr(tables, FIND)
    with capturing():
        assert getattr(tables, FIND) is not before
        with capturing():
            exported(nn.Linear(3, 3))
    assert getattr(tables, FIND) is before
    with pytest.raises(ZeroDivisionError), capturing():
        raise ZeroDivisionError
    assert getattr(tables, FIND) is before


def test_a_composite_operator_that_is_registered_between_two_captures_is_decomposed(
    tables: ModuleType,
) -> None:
    with capturing():
        exported(nn.Linear(3, 3))
    library = torch.library.Library("ampopt_tests_of_tables", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")

    def twice(_: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.ampopt_tests_of_tables.twice(x)
        return result

    with capturing():
        graph = exported(Model(twice)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.mul.Tensor]
