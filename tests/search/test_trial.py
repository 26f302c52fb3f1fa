"""A trial: its row says what became of it, and only a wrong or failed one is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampopt.measure.entry import Entry, Verdict
from ampopt.search.trial import Trial
from tests.helpers import program_of


def _trial() -> Trial:
    return Trial(Entry("fp32", "it", Verdict.NOT_TRIED, ""), deadline=0.0, began=0.0)


def test_the_end_completes_the_row_and_keeps_what_was_noted() -> None:
    trial = _trial()
    trial.note(rewrites=3, error=0.5)
    row = trial.end(Verdict.REVERTED, "slower")
    assert trial.is_over
    assert (row.verdict, row.reason, row.rewrites, row.error) == (Verdict.REVERTED, "slower", 3, 0.5)
    assert row.took_s > 0.0


@pytest.mark.parametrize(
    ("verdict", "is_wrong"),
    [
        (Verdict.FAILED, True),
        (Verdict.REVERTED, True),
        (Verdict.DECLINED, False),
        (Verdict.NOT_TRIED, False),
    ],
)
def test_without_a_program_only_what_ran_is_wrong(verdict: Verdict, is_wrong: bool) -> None:
    trial = _trial()
    trial.end(verdict, "why")
    assert trial.is_wrong == is_wrong


def test_what_is_right_but_slow_is_not_wrong() -> None:
    trial = _trial()
    trial.program = program_of(nn.ReLU(), torch.ones(2))
    trial.end(Verdict.REVERTED, "slower")
    assert not trial.is_wrong
