"""A program's own graph as the judge of a search."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from ampopt.ir.judged import Judge, Judged, OwnJudge
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Numerics, Result
from ampopt.passes import BakeAutocast
from tests.helpers import BF16, FP16, program_of
from tests.support import overflowing
from tests.support.rewritten import rewritten


def test_it_looks_at_the_examples_and_at_draws_like_them() -> None:
    x = torch.randn(2, 4)
    judge = OwnJudge(program_of(nn.Linear(4, 4), x, lane=BF16))
    assert len(judge.calls) == 3
    assert torch.equal(judge.calls[0][0], x)
    assert not torch.equal(judge.calls[1][0], judge.calls[2][0])


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.05, False), (float("nan"), False)])
def test_the_limit_follows_from_the_error_of_the_first_program(factor: float, passes: bool) -> None:
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4), lane=BF16)
    check = OwnJudge(program).check(rewritten(program, torch.mul, factor))
    assert check.passed == passes
    assert check.limit <= 2.0**-6


def test_where_the_first_program_overflows_the_limit_is_that_without_eager() -> None:
    program = program_of(overflowing.one_branch(), torch.randn(overflowing.IMAGE), lane=FP16)
    check = OwnJudge(program).check(BakeAutocast().apply(program).program)
    assert check.limit == FP16.limits.without_eager
    assert check.error == float("inf")
    assert not check.passed


@dataclasses.dataclass(frozen=True)
class _Asks(Judged):
    numerics = Numerics.BITWISE
    family = Family.REWRITE
    portable = True

    def apply_judged(self, program: Program, judge: Judge) -> Result:
        found: Check = judge.check(program)
        assert judge.has_time()
        return Result(program, 0, hints=(f"{found.passed} on {len(judge.calls)}",))


def test_a_pass_that_searches_judges_itself_where_nobody_else_does() -> None:
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4), lane=BF16)
    assert _Asks().apply(program).hints == ("True on 3",)
