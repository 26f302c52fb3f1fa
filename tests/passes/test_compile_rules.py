"""compile: operators that inductor refuses, or for which it has rules other than PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32
from ampopt.passes import Compile
from tests.helpers import Model, apply_to_untouched, check_outputs, program_of


def test_a_tensor_that_the_model_makes_of_numbers_is_no_obstacle() -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    model = Model(lambda m, x: x * torch.tensor([1.0, 2.0, 3.0]))
    program = program_of(model, x)
    assert any(node.target is aten.lift_fresh_copy.default for node in calls(program.graph))
    assert Compile().why_not(program) is None
    result = apply_to_untouched(Compile(), program)
    check_outputs(Compile.numerics, program, result.program, model, [x], FP32)


def test_quotients_rounded_down_and_remainders_are_eagers_where_they_jump() -> None:
    """Inductor rounds a / b: 1 // 0.1 was 10, and 0.1 % inf NaN. Random examples are no multiples."""

    def divided(m: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        down = torch.div(a, 0.1, rounding_mode="floor")
        return a // 0.1, down, 1.0 // b, a // b, a % b, 0.1 % b, -5.0 % b, a % -3, a % 0.1

    draws = [torch.randn(72, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    program = program_of(Model(divided), *draws)
    done = Compile().apply(program).program
    spoilt = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e20, 1e4, -1e4])
    a = torch.cat([torch.arange(-32, 32) * 0.1, spoilt])
    b = torch.cat([torch.arange(1, 65) * 0.1, spoilt.flip(0)])
    for given in ((a, b), (b, a), (-b, b), (a, -a)):
        for found, expected in zip(done.run(*given), divided(None, *given), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_out_of_range_is_pytorchs_error_and_does_not_end_the_process() -> None:
    """Inductor's loops of several threads check each index, and raise where nothing can catch it."""
    ids = torch.randint(0, 50, (512, 64), generator=torch.Generator().manual_seed(0))
    model = Model(lambda m, i: F.embedding(i, m.table) * 2 + m.table[i].sin(), table=torch.randn(50, 64))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        program = program_of(model, ids)
        done = Compile().apply(program).program
        check_outputs(Compile.numerics, program, done, model, [ids], FP32)
        for place in (50, -1):
            ids[500, 3] = place
            with pytest.raises(IndexError, match="index out of range in self"):
                done.run(ids)
    finally:
        torch.set_num_threads(threads)
