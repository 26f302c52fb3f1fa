"""The limit of a mixed lane in which eager is no yardstick: it overflows, or is too inexact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.lanes import FP32, Lane
from ampopt.measure.verify import Verifier
from ampopt.passes import KeepFp32
from tests.helpers import BF16, FP16, Model
from tests.support import overflowing
from tests.support.overflowing import IMAGE, TOKENS
from tests.support.planted import captured_of


def verifier_of(model: nn.Module, *args: Tensor, **options: Any) -> Verifier:
    original, captured = captured_of(model.eval(), *args)
    return Verifier(original, captured, **options)


def off_by(verifier: Verifier, factor: float) -> Any:
    """The original in FP32, but for a factor."""
    return lambda *x: [y * (1 + factor) for y in verifier.eager(FP32)(*x)]


def cancelling() -> nn.Module:
    """A difference of two results that lower precision rounds to nothing but error."""
    torch.manual_seed(0)
    conv, other = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
    other.load_state_dict({name: tensor * (1 + 1e-4) for name, tensor in conv.state_dict().items()})
    return Model(lambda m, x: m.conv(x) - m.other(x), conv=conv, other=other)


@pytest.mark.parametrize("lane", [FP32, FP16, BF16])
def test_where_eager_is_good_it_is_the_yardstick(lane: Lane) -> None:
    verifier = verifier_of(nn.Linear(8, 4), torch.randn(2, 8))
    assert [verifier.yardstick(lane, draw, 0) for draw in verifier.draws] == [None] * 3


@pytest.mark.parametrize(("factor", "passes"), [(2e-4, True), (5e-3, False), (0.5, False), (0.99, False)])
def test_where_eager_overflows_the_limit_is_that_of_its_rounding_without_its_range(
    factor: float, passes: bool
) -> None:
    verifier = verifier_of(overflowing.one_branch(), torch.randn(IMAGE))
    assert verifier.own_error(FP16) == float("inf")
    check = verifier.check(off_by(verifier, factor), FP16)
    assert check.passed is passes
    assert 2.0**-10 <= check.limit < 5e-3


def test_a_program_that_keeps_what_overflows_in_fp32_is_within_that_limit() -> None:
    original, captured = captured_of(overflowing.one_branch(), torch.randn(IMAGE))
    verifier, program = Verifier(original, captured), FP16.start(captured.program)
    found = KeepFp32().apply(program).replay  # bfloat16, where that is faster, has an error of 3e-3
    assert isinstance(found, KeepFp32)
    assert verifier.check(found.in_fp32().apply(program).program.run, FP16).passed


@pytest.mark.parametrize("factor", [0.02, 0.3, 0.95])
def test_overflow_is_no_jump_that_would_be_a_licence(factor: float) -> None:
    """Eager with changed rounding overflows as well: twice infinity is no limit."""
    verifier = verifier_of(overflowing.attention(), torch.randn(TOKENS))
    assert not verifier.check(off_by(verifier, factor), FP16).passed
    assert verifier.largest_jump(FP16, verifier.draws[0], 0) == 0.0


@pytest.mark.parametrize("lane", [FP16, BF16])
@pytest.mark.parametrize(("factor", "passes"), [(5e-3, True), (0.02, False), (0.5, False), (0.9, False)])
def test_where_eager_is_too_inexact_the_limit_is_what_auto_accepts(
    lane: Lane, factor: float, passes: bool
) -> None:
    verifier = verifier_of(cancelling(), torch.randn(IMAGE))
    assert verifier.own_error(lane) > lane.limits.largest
    check = verifier.check(off_by(verifier, factor), lane)
    assert check.passed is passes
    assert check.limit == lane.limits.without_eager == 1e-2


@pytest.mark.parametrize(
    ("called", "limit"),
    [(1e-3, 1e-2), (0.03, 0.06), (0.15, 0.2), (0.25, 1e-2), (float("nan"), 1e-2), (float("inf"), 1e-2)],
)
def test_where_the_caller_gets_more_error_from_tf32_it_is_twice_that(
    monkeypatch: pytest.MonkeyPatch, called: float, limit: float
) -> None:
    """An untrained DeepLabV3 is off by 0.17 in TF32, as its caller has it, and by 0.21 under autocast."""

    def rounds(self: Verifier, *tensors: Tensor) -> list[Tensor]:
        return [y * (1 + called) for y in self.eager(FP32)(*tensors)]

    monkeypatch.setattr("ampopt.measure.own_errors.rounds_to_tf32", lambda device: True)
    monkeypatch.setattr(Verifier, "as_called", rounds)
    verifier = verifier_of(cancelling(), torch.randn(IMAGE))
    assert verifier.own_error(FP16) > FP16.limits.largest
    for factor, passes in ((0.9 * limit, True), (1.1 * limit, False)):
        check = verifier.check(off_by(verifier, factor), FP16)
        assert check.passed is passes
        assert check.limit == pytest.approx(limit, rel=0.01)
    assert verifier.check(off_by(verifier, 0.03), FP32).passed is False, "strict FP32 stays strict"


def test_a_tolerance_of_the_users_is_the_limit_all_the_same() -> None:
    verifier = verifier_of(overflowing.one_branch(), torch.randn(IMAGE), tolerance=0.05)
    assert verifier.check(off_by(verifier, 0.04), FP16).passed
    assert not verifier.check(off_by(verifier, 0.06), FP16).passed


def test_nan_never_passes_there_either() -> None:
    verifier = verifier_of(overflowing.one_branch(), torch.randn(IMAGE))
    assert not verifier.check(verifier.eager(FP16), FP16).passed


def test_one_draw_on_which_eager_overflows_is_judged_by_the_others() -> None:
    """The usual error is that of most draws."""
    verifier = verifier_of(nn.Linear(8, 4), torch.randn(2, 8))
    draw = verifier.draws[1]
    assert verifier.own_errors(FP16, draw)
    verifier._own[FP16, draw.name] = [float("inf")]
    assert verifier.yardstick(FP16, draw, 0) is None
    assert verifier.limit(FP16, draw, 0, 0.5) < 5e-3


def test_far_outside_where_eager_overflows_nothing_is_decided() -> None:
    verifier = verifier_of(overflowing.one_branch(), torch.randn(IMAGE))
    good = off_by(verifier, 1e-5)
    check = verifier.check(good, FP16, everywhere=True)
    assert check.passed
