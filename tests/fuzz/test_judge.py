"""The judge of random networks: what counts as a fault, and what rounding or eager itself explains."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.calls import Call
from fuzz.judge import Answered, Judge
from tests.helpers import Model
from tests.measure.test_verify import near_ties, permutation
from tests.measure.test_verify_faults import TwoOfAKind, with_fault_beside


def judge_of(model: nn.Module, *inputs: Tensor) -> Judge:
    return Judge(model.eval(), [Call((x,), {}) for x in inputs])


def objection(judge: Judge, output: Tensor) -> str | None:
    return judge.objection([Answered([output.detach()], list(judge.calls[0].tensors))], torch.float32)


def test_a_flip_of_the_models_own_cast_is_no_fault_and_many_are() -> None:
    x = torch.rand(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    judge = judge_of(Model(lambda m, x: x.bfloat16().float() * 3), x)
    right = judge.plain[0].outputs[0]
    one = right.clone()
    one[0, 0, 0, 0] *= 1 + 2.0**-7
    assert objection(judge, one) is None
    assert objection(judge, right * 1.05) is not None


def test_nan_that_rounding_alone_moves_is_no_fault_and_other_nan_is() -> None:
    images = with_fault_beside(near_ties(eager_flips=False))
    images[:, 64, :, 4] = float("nan")
    judge, model = judge_of(TwoOfAKind(), images), TwoOfAKind()
    reference = judge.plain[0].outputs[0]
    answers = [model(torch.cat((images[:, :64][:, permutation(s)], images[:, 64:]), 1)) for s in range(50)]
    moved = [a for a in answers if not torch.equal(torch.isnan(a), torch.isnan(reference))]
    assert moved, "no order of the sum moves the largest"
    assert [objection(judge, answer) for answer in moved] == [None] * len(moved)
    assert objection(judge, reference.roll(1, 2)) is not None


class Unsteady(nn.Module):
    """Reads memory that nobody has written, so to speak: every eighth call is another."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Twice the input, and now and then three times."""
        type(self).calls += 1
        return F.relu(x) * (3 if type(self).calls % 8 == 0 else 2)


def test_what_eager_answers_differently_now_and_then_is_no_yardstick() -> None:
    judge = judge_of(Unsteady(), torch.rand(2, 3))
    assert judge.repeats(times=1)
    assert not judge.repeats(times=8)
    assert judge_of(nn.ReLU(), torch.rand(2, 3)).repeats(times=8)


class Whole(nn.Module):
    """Cannot be run with other weights, as some of PyTorch's own kernels cannot be under a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 1.25))

    def forward(self, x: Tensor) -> Tensor:
        """Times the weight, which float32 holds and a rounding moves."""
        if self.weight != 1.25:
            raise RuntimeError("expected scalar type Float but found BFloat16")
        return x * self.weight


def test_a_rounding_that_eager_refuses_tells_nothing() -> None:
    judge = judge_of(Whole(), torch.tensor([1.0, float("nan"), 3.0]), torch.rand(3))
    right = judge.plain[0].outputs[0]
    assert objection(judge, right) is None
    assert "finite where" in str(objection(judge, right.nan_to_num()))
    off = [Answered(list(a.outputs), list(a.arguments)) for a in judge.plain]
    off[1].outputs[0] = off[1].outputs[0] * 1.01
    assert "is over" in str(judge.objection(off, torch.float32))
