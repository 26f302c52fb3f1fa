"""The verifier as the judge of a search: its calls, states and limits are the verification's."""

from __future__ import annotations

import time

import torch
from torch import nn

from ampopt.measure.draws import CALLS_IN_A_ROW
from ampopt.measure.verifiers_judge import VerifiersJudge
from ampopt.measure.verify import Verifier
from tests.helpers import BF16
from tests.support import overflowing
from tests.support.planted import captured_of
from tests.support.rewritten import rewritten


def judge_of(model: nn.Module, x: torch.Tensor, seconds: float = 60.0) -> VerifiersJudge:
    original, captured = captured_of(model, x)
    return VerifiersJudge(Verifier(original, captured), BF16, time.perf_counter() + seconds)


def test_its_calls_are_those_of_the_ordinary_draws() -> None:
    judge = judge_of(nn.Linear(4, 4), torch.randn(2, 4))
    assert len(judge.calls) == 3
    for (x,), draw in zip(judge.calls, judge.verifier.draws, strict=True):
        assert torch.equal(x, draw.calls[0][0])
        x.add_(1)
        assert not torch.equal(x, draw.calls[0][0]), "programs are verified with what a pass writes"


def test_a_state_comes_with_each_call_as_it_has_become() -> None:
    model = overflowing.Recurrent()
    judge = judge_of(model, torch.randn(2, 8))
    assert len(judge.calls) == 3 * CALLS_IN_A_ROW
    states = [call[1] for call in judge.calls[:3]]
    assert not states[0].any()
    for (x, before), after in zip(judge.calls, states[1:], strict=False):
        expected = model.again(before) + model.first(x.abs())
        assert torch.allclose(after, expected.detach(), rtol=1e-5)
    assert {state.dtype for state in states} == {torch.float32}


def test_it_judges_errors_as_the_verification_does() -> None:
    judge = judge_of(nn.Linear(4, 4), torch.randn(2, 4))
    program = BF16.start(judge.verifier.captured.program)
    assert judge.check(program).passed
    wrong = rewritten(program, torch.mul, 1.1)
    assert judge.check(wrong) == judge.verifier.check(wrong.run, BF16)


def test_its_time_ends() -> None:
    assert judge_of(nn.Linear(4, 4), torch.randn(2, 4)).has_time()
    assert not judge_of(nn.Linear(4, 4), torch.randn(2, 4), seconds=-1.0).has_time()
