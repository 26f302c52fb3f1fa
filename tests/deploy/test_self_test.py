"""A program that would not pass its bundle's self-test is refused, with what to do about it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.deploy.self_test import SelfTest, pass_test
from ampopt.errors import VerificationError
from ampopt.ir.lanes import FP32, Lane
from tests.helpers import BF16, Model, program_of

X = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))


def _best(_: Any, x: Tensor) -> Tensor:
    return x.topk(4).indices * 1.0


def _plain(_: Any, x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("function", "lane", "advice"),
    [
        (_plain, BF16, "optimize with a larger tolerance= to accept that"),
        (_best, FP32, "optimize with a larger tolerance= to accept that"),
        (_best, BF16, "or with precision='fp32': the model takes the places of the largest values"),
    ],
)
def test_what_to_do_about_a_program_that_does_not_pass(function: Any, lane: Lane, advice: str) -> None:
    program = lane.start(program_of(Model(function), X))
    right = program.run(X)[0]
    pass_test(program, SelfTest({"x": X}, {"output": right}, 1e-2))
    with pytest.raises(VerificationError, match=re.escape(advice)):
        pass_test(program, SelfTest({"x": X}, {"output": right + 1}, 1e-2))
