"""Results of passes ahead of their trial: taken where shapes come true, given up where not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampopt.ir.shapes import Foretold
from ampopt.search.foreseen import Foreseen
from tests.helpers import program_of
from tests.support.planted import Planted


@pytest.mark.parametrize("comes_true", [True, False])
def test_results_are_taken_once_or_given_up_with_what_was_begun(
    monkeypatch: pytest.MonkeyPatch, comes_true: bool
) -> None:
    monkeypatch.setattr(Foretold, "came_true", lambda _: comes_true)
    given_up: list[str] = []
    foreseen = Foreseen(lambda: given_up.append("it"))
    program, step = program_of(nn.Linear(4, 4).eval(), torch.ones(2, 4)), Planted("one")
    made = foreseen.replay((step,), program)
    found = foreseen.take(step, program)
    assert (found is not None and found.program.graph is made.graph) is comes_true
    assert foreseen.take(step, program) is None
    assert given_up == ([] if comes_true else ["it"])
