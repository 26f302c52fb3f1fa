"""Verification: what passes, what does not, and the limit that decides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.errors import InputError
from ampopt.ir.lanes import FP32, Lane
from tests.helpers import BF16, FP16, Model
from tests.support.planted import optimize
from tests.support.verifying import verifier_of

X = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh()))).eval()


@pytest.mark.parametrize("lane", [FP32, FP16, BF16])
def test_eager_in_its_own_lane_passes(lane: Lane) -> None:
    verifier, _ = verifier_of(deep(), X)
    check = verifier.check(verifier.eager(lane), lane)
    assert check.passed
    assert check.error == verifier.own_error(lane) <= check.limit


@pytest.mark.parametrize("lane", [FP32, FP16, BF16])
def test_the_limit_is_a_multiple_of_eagers_own_error(lane: Lane) -> None:
    verifier, _ = verifier_of(deep(), X)
    eager, limit = verifier.eager(lane), lane.limits.allowed(verifier.own_error(lane))
    for factor, passes in ((1 + 0.3 * limit, True), (1 + 3 * limit, False)):
        check = verifier.check(lambda *x, f=factor: [y.double() * f for y in eager(*x)], lane)
        assert check.passed is passes
        if not passes:
            assert check.reason is not None
            assert check.reason.startswith("output 0: error ")
            assert "(eager's own: " in check.reason


def test_a_program_that_is_right_on_the_example_only_is_refused() -> None:
    verifier, original = verifier_of(deep(), X)
    answer = original(X)
    assert not verifier.check(lambda x: [answer], FP32).passed


def test_every_output_has_its_own_limit() -> None:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return 1e6 * m.linear(x), m.linear(x)

    verifier, original = verifier_of(Model(run, linear=nn.Linear(16, 3)), X)
    check = verifier.check(lambda x: [run(original, x)[0], run(original, x)[1] + 1e-3], FP32)
    assert check.reason is not None
    assert check.reason.startswith("output 1")


@pytest.mark.parametrize("outputs", [[], [torch.zeros(2, 16)] * 2])
def test_a_program_with_another_number_of_outputs_is_refused(outputs: list[Tensor]) -> None:
    verifier, _ = verifier_of(deep(), X)
    assert not verifier.check(lambda x: outputs, FP32).passed


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tolerance", [None, 1e9])
def test_nan_and_infinity_never_pass(bad: float, tolerance: float | None) -> None:
    verifier, original = verifier_of(deep(), X, tolerance=tolerance)

    def run(x: Tensor) -> list[Tensor]:
        out = original(x).clone()
        out[0, 0] = bad
        return [out]

    assert not verifier.check(run, FP32).passed


def test_the_same_infinity_as_the_models_own_passes() -> None:
    verifier, _ = verifier_of(Model(lambda m, x: x / 0.0), X)
    assert verifier.check(lambda x: [x / 0.0], FP32).passed


def test_infinity_of_eager_alone_is_no_licence() -> None:
    verifier, _ = verifier_of(Model(lambda m, x: torch.exp(100 * x.abs())), X)
    assert not verifier.check(lambda x: [torch.full_like(x, float("nan"))], FP32).passed


@pytest.mark.parametrize(("tolerance", "passes"), [(0.2, True), (0.05, False)])
def test_a_tolerance_overrides_the_limit(tolerance: float, passes: bool) -> None:
    verifier, original = verifier_of(deep(), X, tolerance=tolerance)
    check = verifier.check(lambda x: [original(x) * 1.1], FP32)
    assert (check.passed, check.limit) == (passes, tolerance)


def test_a_metric_gets_the_models_own_structure_and_decides() -> None:
    seen: list[Any] = []

    def metric(outputs: Any, reference: Any) -> float:
        seen.append((outputs, reference))
        return float((outputs["logits"].argmax(1) != reference["logits"].argmax(1)).float().mean())

    verifier, original = verifier_of(
        Model(lambda m, x: {"logits": m.l(x)}, l=nn.Linear(16, 5)), X, metric=metric
    )
    assert verifier.check(lambda x: [original(x)["logits"] * 100], FP32).passed
    assert set(seen[0][0]) == set(seen[0][1]) == {"logits"}
    wrong = verifier.check(lambda x: [-original(x)["logits"]], FP32)
    assert wrong.reason == "the metric gives 1, over the tolerance 0"
    assert not verifier.check(lambda x: [original(x)["logits"] * float("nan")], FP32).passed


def test_a_metric_may_write_into_what_it_gets() -> None:
    def in_place(outputs: Tensor, reference: Tensor) -> float:
        reference -= outputs
        return float(reference.abs().max())

    verifier, original = verifier_of(deep(), X, metric=in_place, tolerance=1e-3)
    for _ in range(3):
        assert verifier.check(lambda x: [original(x)], FP32).passed


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (lambda outputs, reference: outputs.flatten() @ reference.flatten(), "RuntimeError: .*dtype"),
        (lambda outputs, reference: None, "TypeError: float.. argument must be"),
        (
            lambda outputs, reference: -1,
            "outputs: .*the metric gives -1: let it return a distance",
        ),
        (lambda outputs, reference: -math.inf, "the metric gives -inf: let it return a distance"),
        (lambda outputs, reference: outputs.logits, "fails on the original's own outputs: AttributeError: '"),
    ],
)
def test_a_metric_that_fails_is_the_users_to_mend(metric: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        verifier_of(deep(), X, metric=metric)
    with pytest.raises(InputError, match="those of the original in float64"):
        optimize(deep(), X, metric=metric)


def test_a_spoilt_example_spoils_no_other_draw() -> None:
    """A depth image has pixels without a number; where all depends on all, nothing else could be told."""
    mixing = Model(lambda m, x: (x / (x.mean() + 3) * 60).cos())
    spoilt = torch.randn(1, 1, 8, 8)
    spoilt[0, 0, 3, 3], spoilt[0, 0, 4, 4] = math.nan, math.inf
    verifier, original = verifier_of(mixing, spoilt)
    assert all(torch.isfinite(draw.calls[0][0]).all() for draw in verifier.draws[1:])
    assert not verifier.check(lambda x: [original(x * 1.01)], FP32).passed
    assert verifier.check(lambda x: [original(x)], FP32, everywhere=True).passed


def test_a_metric_that_gives_nan_is_not_passed() -> None:
    verifier, original = verifier_of(deep(), X, metric=lambda a, b: float("nan"), tolerance=5.0)
    assert verifier.check(lambda x: [original(x)], FP32).reason == "the metric gives NaN"


def test_a_metric_that_only_rounding_takes_below_0_gives_0() -> None:
    verifier, original = verifier_of(deep(), X, metric=lambda a, b: -1e-7)
    check = verifier.check(lambda x: [original(x)], FP32)
    assert (check.passed, check.error) == (True, 0.0)


def test_a_negative_number_is_no_distance() -> None:
    def score(outputs: Tensor, reference: Tensor) -> float:
        return -1.0 if float((outputs - reference).norm() / reference.norm()) > 0.5 else 0.0

    verifier, original = verifier_of(deep(), X, metric=score, tolerance=1.0)
    assert verifier.check(lambda x: [original(x)], FP32).passed
    with pytest.raises(InputError, match=r"^the metric gives -1: let it return a distance"):
        verifier.check(lambda x: [2 * original(x)], FP32)


def test_a_model_that_fails_in_float64_is_compared_with_itself_in_float32() -> None:
    def only_float32(m: Any, x: Tensor) -> Any:
        if x.dtype is torch.float64:
            raise TypeError("no float64 here")
        return m.weight @ x

    verifier, original = verifier_of(Model(only_float32, weight=torch.randn(3, 2)), X)
    assert verifier.note is not None
    assert verifier.note.startswith("the reference is the model in float32, because it fails in float64")
    assert "no float64 here" in verifier.note
    assert verifier.check(lambda x: [original(x)], FP32).passed


def test_complex_weights_inputs_and_outputs_are_compared_with_complex128() -> None:
    def mixed(m: Any, x: Tensor, factors: Tensor) -> Any:
        return torch.fft.rfft(m.l(x)) @ m.weight * factors

    torch.manual_seed(0)
    weight, factors = torch.randn(9, 9, dtype=torch.complex64), torch.randn(9, dtype=torch.complex64)
    verifier, original = verifier_of(Model(mixed, l=nn.Linear(16, 16), weight=weight), X, factors)
    assert verifier.note is None
    (reference,) = verifier.reference(verifier.draws[0])[0]
    assert reference.dtype is torch.complex128
    assert 0 < verifier.own_error(FP32) < 1e-6
    assert verifier.check(lambda *each: [original(*each)], FP32, everywhere=True).passed
    for wrong in (lambda y: y.real + 0j, torch.conj, lambda y: y * (1 + 1e-3j)):
        assert not verifier.check(lambda *each, wrong=wrong: [wrong(original(*each))], FP32).passed


def test_integer_outputs_count_by_the_share_that_differs() -> None:
    verifier, original = verifier_of(Model(lambda m, x: m.l(x).argmax(1), l=nn.Linear(16, 5)), X)
    assert verifier.check(lambda x: [original(x)], FP32).passed
    assert not verifier.check(lambda x: [original(x) + 1], FP32).passed


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (nn.EmbeddingBag(10, 4), (torch.arange(8), torch.tensor([0, 2, 5]))),
        (Model(lambda m, x: m.table(x.round().long()), table=nn.Embedding(10, 4)), (torch.zeros(1, 40),)),
    ],
    ids=["offsets", "constant indices"],
)
def test_a_draw_that_the_model_cannot_take_is_left_out(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    verifier, _ = verifier_of(model, *args)
    assert verifier.check(verifier.eager(FP32), FP32).passed


class SegNet(nn.Module):
    """A pooling whose arg-max goes into the output; its channels' sum rounds as it is ordered."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 1, 1, bias=False)
        nn.init.constant_(self.conv.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, pool, unpool: every maximum stays where it was."""
        pooled, where = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return F.max_unpool2d(pooled, where, [2, 2])


def permutation(seed: int) -> Tensor:
    return torch.randperm(64, generator=torch.Generator().manual_seed(seed))


def near_ties(eager_flips: bool) -> Tensor:
    """Images of 16 windows, three of which hold two sums of the same numbers in two orders as their maxima.

    Rounding decides which is larger; `eager_flips`: eager decides one of them otherwise than float64.
    """
    for seed in range(100):
        x = torch.randn(1, 64, 8, 8, generator=torch.Generator().manual_seed(seed)) - 2
        for row in (0, 2, 4):
            x[:, :, row, 0] = x[:, :, row, 0].abs()
            x[:, :, row, 1] = x[:, permutation(seed + row), row, 0]
        own = verifier_of(SegNet(), x)[0].own_error(FP32)
        if (own > 1e-2) == eager_flips:
            return x
    raise AssertionError("no such images")


def test_a_flip_that_rounding_alone_can_cause_is_accepted() -> None:
    verifier, original = verifier_of(SegNet(), near_ties(eager_flips=False))
    orders = map(permutation, range(50))
    checks = (verifier.check(lambda x, o=o: [original(x[:, o])], FP32) for o in orders)
    flipped = next(check for check in checks if check.error > 1e-2)
    assert flipped.passed, flipped.reason


@pytest.mark.parametrize("eager_flips", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: y * 1.001,
        lambda y: y.roll(1, 3),
        lambda y: y.flip(3),
        torch.zeros_like,
        lambda y: y * 100,
    ],
    ids=["scaled", "moved", "mirrored", "zero", "huge"],
)
def test_a_real_wrong_rewrite_of_a_model_with_ties_is_refused(wrong: Any, eager_flips: bool) -> None:
    verifier, original = verifier_of(SegNet(), near_ties(eager_flips))
    assert not verifier.check(lambda x: [wrong(original(x))], FP32).passed


def state_model() -> Model:
    """A leaky integrator whose state is in a buffer."""

    def step(m: Any, x: Tensor) -> Tensor:
        m.h = 0.5 * m.h + m.linear(x)
        return m.h.tanh()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Model(step, linear=nn.Linear(16, 3), h=torch.zeros(2, 3)).eval()


def test_a_state_is_verified_over_calls_in_a_row() -> None:
    verifier, _ = verifier_of(state_model(), X)
    eager = verifier.eager(FP32)
    assert verifier.check(eager, FP32).passed

    def forgets(x: Tensor, h: Tensor) -> list[Tensor]:
        return list(eager(x, torch.zeros_like(h)))

    def drifts(x: Tensor, h: Tensor) -> list[Tensor]:
        out, left = eager(x, h)
        return [out, left * 1.001]

    assert not verifier.check(forgets, FP32).passed
    assert not verifier.check(drifts, FP32).passed


def test_the_limit_has_a_bound_however_wrong_eager_is() -> None:
    def noisy(m: Any, x: Tensor) -> Tensor:  # FP32 loses most digits here, float64 does not
        return (1e7 + m.linear(x)) - 1e7  # type: ignore[no-any-return]

    verifier, original = verifier_of(Model(noisy, linear=nn.Linear(16, 3)), X)
    assert verifier.own_error(FP32) > FP32.limits.largest
    assert not verifier.check(lambda x: [original(x) * 5], FP32).passed


class _Chaotic(nn.Module):
    """Rounding decides the results: the sine of large numbers, of which few bits are right."""

    def forward(self, x: Tensor) -> Tensor:
        """Numbers of which float32 knows nothing."""
        return torch.sin(x.mul(1e9).add(1.0).mul(7.0))


@pytest.mark.parametrize(("lane", "passes"), [(FP32, True), (BF16, False)])
def test_the_bits_of_a_chaotic_original_are_right_in_fp32(lane: Lane, passes: bool) -> None:
    verifier, _ = verifier_of(_Chaotic(), torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    assert verifier.own_error(lane) > 0.1
    check = verifier.check(verifier.eager(lane), lane, everywhere=True)
    assert check.passed == passes
    assert (check.note is not None) == passes
    if passes:
        assert "bit for bit" in str(check.note)
        other = verifier.check(lambda x: [torch.sin(x.mul(7e9).add(7.0))], lane)
        assert "error" in str(other.reason)


def test_the_bits_of_the_original_do_not_outdo_a_users_tolerance() -> None:
    verifier, _ = verifier_of(_Chaotic(), torch.randn(4, 64), tolerance=1e-2)
    assert not verifier.check(verifier.eager(FP32), FP32).passed
