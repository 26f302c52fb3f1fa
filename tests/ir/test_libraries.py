"""Libraries that a model calls: what of them is looked at, and what their own containers keep."""

from __future__ import annotations

import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.outside import Code, variables_kept
from tests.ir.test_outside import Writing, X

LIBRARY = """
LAST = {}

def wrapped(function):
    def inner(*args):
        return function(*args)
    return inner

def helped(x):
    return _deeper(x)

def _deeper(x):
    LAST["x"] = x
    return x

def visited(visitor, x):
    return visitor.visit_own(x)

def _last(x):
    return x

""" + "\n\n".join(
    f"def _far{n}(x):\n    return {'_last' if n == 999 else f'_far{n + 1}'}(x)" for n in range(1000)
)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An installed module that is not of the model's package."""
    made = types.ModuleType("some_library")
    made.__file__ = str(Path(sysconfig.get_paths()["purelib"], "some_library.py"))
    exec(LIBRARY, vars(made))
    monkeypatch.setitem(sys.modules, "some_library", made)
    return made


class Visitor:
    """An object whose method a library calls by its name."""

    def visit_own(self, x: Tensor) -> Tensor:
        """What is read of it is the caller's."""
        return x


def test_a_library_is_looked_through_up_to_a_number_of_its_functions(library: types.ModuleType) -> None:
    """SymPy's functions, 7,000 of them, took 20 s of a budget of 4 s."""
    helped, visited, far, visitor = library.helped, library.visited, library._far0, Visitor()

    def write(x: Tensor) -> Any:
        return far(helped(visited(visitor, x)))

    code = Code(Writing(library.wrapped(write)))
    assert {write, helped, library._deeper, Visitor.visit_own} <= set(code.functions)
    assert library._last not in code.functions
    assert len(code.functions) < 320
    assert "the global variable LAST" in code.variables()


def test_what_a_library_adds_to_its_own_containers_stays(library: types.ModuleType) -> None:
    with variables_kept(model := Writing(library.helped)):
        model(X)
    assert library.LAST["x"] is X


def test_an_exported_program_leads_to_no_library() -> None:
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(nn.Linear(3, 2), (torch.randn(4, 3),), dynamic_shapes=(batch,))
    assert len(Code(program.module()).functions) < 10
