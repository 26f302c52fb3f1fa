"""An optimized model as data: a module, its copy and its files are made of the same."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.ir.lanes import FP32
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger
from tests.support.planted import captured_of


def test_a_copy_is_made_of_the_same_and_neither_changes_it() -> None:
    original, captured = captured_of(nn.Linear(4, 4).eval(), torch.ones(2, 4))
    recipe, report = Recipe(FP32, ()), Ledger("model", {}, ())
    fast = OptimizedModule(original, captured, captured.program, recipe, report)
    own = fast._optimized
    assert (own.original, own.captured, own.recipe, own.report) == (original, captured, recipe, report)
    duplicate = copy.deepcopy(fast)._optimized
    assert all(getattr(duplicate, f.name) is getattr(own, f.name) for f in dataclasses.fields(own))
    with pytest.raises(dataclasses.FrozenInstanceError):
        own.recipe = Recipe(FP32, ())  # type: ignore[misc]
    assert original not in fast.modules(), "`.to()` would move the private copy"
