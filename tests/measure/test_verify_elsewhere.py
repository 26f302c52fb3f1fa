"""Verification outside of the examples' range, and with integers that the examples do not have."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.lanes import FP32
from ampopt.measure.own_errors import ROUNDINGS
from ampopt.measure.verify import Verifier
from tests.helpers import Model
from tests.support.verifying import verifier_of

X = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))


def softplus_by_hand(x: Tensor) -> list[Tensor]:
    return [torch.log(torch.sigmoid(x))]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_program_that_is_right_in_the_examples_range_only(everywhere: bool) -> None:
    verifier, _ = verifier_of(Model(lambda m, x: F.logsigmoid(x)), X)
    check = verifier.check(softplus_by_hand, FP32, everywhere=everywhere)
    assert check.passed is not everywhere
    if everywhere:
        assert check.reason is not None
        assert "inputs x" in check.reason


def refuses_zeros(x: Tensor) -> list[Tensor]:
    if not x.any():
        raise ValueError("no zeros")
    return [x * 2]


def test_a_program_that_raises_an_error_where_the_original_answers_is_wrong_there() -> None:
    verifier, _ = verifier_of(Model(lambda m, x: x * 2), X)
    assert verifier.check(refuses_zeros, FP32).passed
    check = verifier.check(refuses_zeros, FP32, everywhere=True)
    assert check.reason == "it raises an error where the original answers: ValueError: no zeros"
    assert check.error == float("inf")


def test_an_error_that_leaves_the_device_unusable_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, _ = verifier_of(Model(lambda m, x: x * 2), X)

    def unusable(device: torch.device) -> None:
        raise RuntimeError(f"{device} does not answer")

    monkeypatch.setattr("ampopt.measure.verify.synchronize", unusable)
    with pytest.raises(RuntimeError, match="cpu does not answer"):
        verifier.check(refuses_zeros, FP32, everywhere=True)


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_error_keeps_no_tensor_alive(everywhere: bool) -> None:
    verifier, _ = verifier_of(Model(lambda m, x: x * 2), X)
    made = []

    def raises(x: Tensor) -> list[Tensor]:
        large = x * 2
        made.append(weakref.ref(large))
        raise ValueError("no")

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            verifier.check(raises, FP32, everywhere=everywhere)
        assert made
        assert not any(reference() is not None for reference in made)
    finally:
        gc.enable()


def test_what_fails_in_the_verification_itself_is_no_fault_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier, _ = verifier_of(Model(lambda m, x: x * 2), X)
    monkeypatch.setattr(verifier, "limit", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verifier.check(lambda x: [x * 2], FP32, everywhere=True)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("inputs of 0", lambda x: (x == 0).all()),
        ("constant inputs", lambda x: (x == x.flatten()[0]).all() & (x > 0).all()),
        ("constant negative inputs", lambda x: (x == x.flatten()[0]).all() & (x < 0).all()),
        ("one hot element", lambda x: (x != 0).sum() == 1),
        ("inputs x0.01", lambda x: (x.abs().max() < 0.1) & (x.abs().max() > 0)),
        ("inputs x10", lambda x: (x.abs().max() > 9) & (x.abs().max() < 90)),
        ("inputs x100", lambda x: x.abs().max() > 90),
    ],
)
def test_every_range_is_drawn(name: str, wrong: Any) -> None:
    verifier, original = verifier_of(nn.Linear(16, 3), X)
    check = verifier.check(lambda x: [original(x) * (2 if bool(wrong(x)) else 1)], FP32, everywhere=True)
    assert check.reason is not None
    assert name in check.reason


def test_the_error_that_is_told_is_that_in_the_examples_range() -> None:
    verifier, original = verifier_of(nn.Linear(16, 3), X)

    def worse_elsewhere(x: Tensor) -> list[Tensor]:
        return [original(x) * (1 + 5e-6 * float(x.abs().max() > 9))]

    check = verifier.check(worse_elsewhere, FP32, everywhere=True)
    assert check.passed
    assert check.error < 1e-6


def amplifying(wide: float) -> nn.Module:
    """A model that amplifies the rounding of a sum 80 times where all inputs are at their largest."""
    return Model(lambda m, x: torch.exp(80 * x.mean(1) / wide))


@pytest.mark.parametrize(("off", "passes"), [(4e-6, True), (1e-4, False)])
def test_far_outside_another_order_of_sums_may_change_as_much_as_rounding_them_does(
    off: float, passes: bool
) -> None:
    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1))
    wide = float(x.abs().max())
    verifier, _ = verifier_of(amplifying(wide), x)

    def moved(x: Tensor) -> list[Tensor]:
        is_constant = bool((x == x.flatten()[0]).all())
        return [torch.exp(80 * (x.mean(1) * (1 + off * is_constant)) / wide)]

    check = verifier.check(moved, FP32, everywhere=True)
    assert check.passed == passes
    assert passes or "with constant inputs: error" in str(check.reason)
    (constant,) = [draw for draw in verifier.all_range_draws if draw.name == "constant inputs"]
    assert FP32.limits.allowed(verifier.largest_jump(FP32, constant, 0)) < 80 * off
    within = verifier.largest_jump(FP32, constant, 0, within=True)
    assert (80 * off <= FP32.limits.allowed(within)) == passes


def counted(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds with which all that eager computes is rounded anew from now on."""
    before, seen = verifier.runs_rounded_anew, list[int]()

    def noted(lane: Any, seeds: Any, **options: Any) -> Any:
        for seed in seeds:
            seen.extend([seed] if options["roundings"] else [])
            yield from before(lane, [seed], **options)

    monkeypatch.setattr(verifier, "runs_rounded_anew", noted)
    return seen


@pytest.mark.parametrize(("off", "passes"), [(4e-6, True), (1e-4, False)])
def test_eager_is_rounded_anew_only_until_that_is_enough(
    monkeypatch: pytest.MonkeyPatch, off: float, passes: bool
) -> None:
    """RAFT's compiled loop had 1.2e-5 where 1.1e-5 was allowed, and eager rounded anew moves by 8e-5."""
    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1))
    wide = float(x.abs().max())
    verifier, _ = verifier_of(amplifying(wide), x)
    seen = counted(verifier, monkeypatch)

    def moved(x: Tensor) -> list[Tensor]:
        is_constant = bool((x == x.flatten()[0]).all() & (x > 0).all())
        return [torch.exp(80 * (x.mean(1) * (1 + off * is_constant)) / wide)]

    for _ in range(2):  # what is known is not asked again
        assert verifier.check(moved, FP32, everywhere=True).passed is passes
        assert seen == ([0] if passes else [*range(ROUNDINGS)])


@pytest.mark.parametrize(("step", "passes"), [(1.0, True), (4.5, False)])
def test_a_choice_that_rounding_decides_far_outside_is_seen_in_several_roundings(
    monkeypatch: pytest.MonkeyPatch, step: float, passes: bool
) -> None:
    """A pooling of an encoder took another place in two of four roundings of eager, and in ONNX Runtime."""
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)) + 1
    edge = float((100 * x).double().mean()) * (1 + 1e-7)
    verifier, original = verifier_of(Model(lambda m, x: x * (1 + 0.003 * (x.mean() > edge))), x)
    seen = counted(verifier, monkeypatch)

    def chosen_otherwise(x: Tensor) -> list[Tensor]:
        return [x * (1 + 0.003 * step) if bool(x.mean() > edge / 2) else original(x)]

    assert verifier.check(chosen_otherwise, FP32, everywhere=True).passed is passes
    assert seen == [*range(len(seen))]
    assert len(seen) == ROUNDINGS if not passes else len(seen) > 1


def test_in_the_examples_range_equal_terms_are_no_licence() -> None:
    x = torch.full((2, 4096), 4.0)
    x[:, 0] = 3.9
    verifier, _ = verifier_of(amplifying(4.0), x)
    moved = verifier.check(lambda x: [torch.exp(80 * (x.mean(1) * (1 + 5e-6)) / 4.0)], FP32)
    assert not moved.passed
    assert verifier.check(verifier.eager(FP32), FP32).passed


@pytest.mark.parametrize(("off", "passes"), [(0.0, True), (1e-3, False)])
def test_a_sum_whose_terms_cancel_may_be_made_in_another_order(off: float, passes: bool) -> None:
    """ONNX Runtime's mean of 6,144 numbers around 0 had an error of 1.9e-5, and eager's luck was 4e-7."""
    x = torch.randn(6144, generator=torch.Generator().manual_seed(3))
    x -= x.double().mean() - 5e-4
    verifier, _ = verifier_of(Model(lambda m, x: x.mean()), x)
    in_turn = verifier.check(lambda x: [torch.tensor(x.numpy().cumsum()[-1] / 6144 * (1 + off))], FP32)
    assert in_turn.error > FP32.limits.allowed(verifier.own_error(FP32)), "the case is not one"
    assert in_turn.passed is passes


def test_a_sum_of_few_terms_that_are_not_0_is_certain() -> None:
    mask = torch.zeros(1, 1, 256, 256)
    mask[0, 0, ::64, 100] = 1.0
    x = torch.randn(1, 1, 256, 256, generator=torch.Generator().manual_seed(0))
    verifier, _ = verifier_of(Model(lambda m, x: (x * mask).sum((2, 3))), x)
    rounded = verifier.check(lambda x: [(x * (1 + 2e-5) * mask).sum((2, 3))], FP32)
    assert not rounded.passed
    assert rounded.limit == FP32.limits.always


def test_a_sum_in_float64_is_not_as_uncertain_as_one_in_float32() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    x -= x.double().mean() - 1e-5
    verifier, _ = verifier_of(Model(lambda m, x: x.sum(dtype=torch.float64)), x)
    in_turn = verifier.check(lambda x: [torch.tensor(float(x.numpy().cumsum()[-1])).double()], FP32)
    assert not in_turn.passed


def test_where_eager_overflows_or_is_no_yardstick_nothing_is_decided() -> None:
    verifier, original = verifier_of(Model(lambda m, x: torch.exp(20 * x)), X)
    assert verifier.check(lambda x: [original(x)], FP32, everywhere=True).passed
    normalized, model = verifier_of(Model(lambda m, x: F.layer_norm(x, (16,), eps=1e-12)), X)
    assert normalized.check(lambda x: [model(x + 1e-7)], FP32, everywhere=True).passed


IDS = torch.tensor([[1, 5, 2], [0, 3, 4]])


def looked_up(m: Any, ids: Tensor) -> Tensor:
    return F.embedding(ids, m.rows)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (
            lambda rows, ids: rows[ids],
            "with -1 in the inputs it answers, and eager does not: index out of range",
        ),
        (lambda rows, ids: rows[ids % 6], "with an integer above all others in the inputs it answers"),
    ],
    ids=["from the end", "around"],
)
def test_an_index_that_eager_refuses_is_refused(
    run: Callable[[Tensor, Tensor], Tensor], reason: str, everywhere: bool
) -> None:
    rows = torch.randn(6, 4)
    verifier, original = verifier_of(Model(looked_up, rows=nn.Parameter(rows)), IDS)
    assert verifier.check(lambda ids: [original(ids)], FP32, everywhere=True).passed
    check = verifier.check(lambda ids: [run(rows, ids)], FP32, everywhere=everywhere)
    assert check.passed is not everywhere
    if everywhere:
        assert str(check.reason).startswith(reason)


def test_integers_that_the_examples_do_not_have_are_computed_with_exactly() -> None:
    verifier, original = verifier_of(Model(lambda m, ids: torch.div(ids, 3, rounding_mode="floor")), IDS)
    by_float = verifier.check(lambda ids: [(ids.float() / 3).floor().long()], FP32, everywhere=True)
    assert "with a large integer" in str(by_float.reason)
    cautious = verifier.check(lambda ids: [original(ids[ids < 6].reshape(2, 3))], FP32, everywhere=True)
    assert "with an integer above all others in the inputs it fails" in str(cautious.reason)
    assert verifier.check(lambda ids: [original(ids)], FP32, everywhere=True).passed


def test_an_input_whose_indices_are_refused_does_not_hide_another() -> None:
    rows, counts = nn.Parameter(torch.randn(6, 4)), torch.tensor([4, 9])
    model = Model(
        lambda m, ids, n: (F.embedding(ids, m.rows), torch.div(n, 3, rounding_mode="floor")), rows=rows
    )
    verifier, original = verifier_of(model, IDS, counts)

    def by_float(ids: Tensor, n: Tensor) -> list[Tensor]:
        return [original(ids, n)[0], (n.float() / 3).floor().long()]

    check = verifier.check(by_float, FP32, everywhere=True)
    assert "with a large integer for input 1" in str(check.reason)
    assert verifier.check(lambda *inputs: list(original(*inputs)), FP32, everywhere=True).passed


@pytest.mark.parametrize("bound", ["largest", "smallest"])
def test_sums_that_end_at_the_bounds_of_their_dtype_are_wrong(bound: str) -> None:
    """ONNX Runtime's sum of int32 did, and no single large integer shows it among small ones."""
    verifier, original = verifier_of(Model(lambda m, ids: ids.sum(1, dtype=torch.int32)), -IDS[:, :2].int())
    numbers = torch.iinfo(torch.int32)

    def ending(ids: Tensor) -> list[Tensor]:
        low = numbers.min if bound == "smallest" else -(2**62)
        high = numbers.max if bound == "largest" else 2**62
        return [ids.sum(1).clamp(low, high).int()]

    check = verifier.check(ending, FP32, everywhere=True)
    assert f"with the {bound} integers alone" in str(check.reason)
    assert verifier.check(lambda ids: [original(ids)], FP32, everywhere=True).passed


@pytest.mark.parametrize(
    "function",
    [
        lambda m, ids: torch.div(ids, -1, rounding_mode="trunc"),
        lambda m, ids: torch.divide(ids, -1, rounding_mode="trunc"),
        lambda m, ids: torch.divide(ids, other=-ids.abs().clamp(max=1), rounding_mode="trunc"),
        lambda m, ids: ids.clone().div_(-1, rounding_mode="trunc"),
        lambda m, ids: torch.div(ids, ids // ids.abs().clamp(min=1), rounding_mode="trunc"),
    ],
    ids=["div by -1", "divide by -1", "divide by a sign", "div in place", "div by a sign"],
)
def test_integers_that_end_the_process_in_eager_are_not_tried(function: Any) -> None:
    ids = torch.tensor([[1, 3, 2], [1, 3, 4]])
    verifier, original = verifier_of(Model(function), ids)
    assert verifier.check(lambda ids: [original(ids)], FP32, everywhere=True).passed


@pytest.mark.parametrize(
    ("model", "x", "is_unusual"),
    [
        (nn.Linear(4, 3), torch.randn(2, 4), lambda x: not x.isfinite().all()),
        (Model(lambda m, ids: ids % 7), torch.tensor([[1, 3, 2]]), lambda x: bool((x > 100).any())),
    ],
    ids=["a fault", "another integer"],
)
def test_a_program_that_writes_to_unusual_inputs_alone_is_caught(
    model: nn.Module, x: Tensor, is_unusual: Any
) -> None:
    verifier, original = verifier_of(model.eval(), x)

    def writes(given: Tensor) -> list[Tensor]:
        result = original(given.clone())
        if is_unusual(given):
            given.zero_()
        return [result]

    assert verifier.check(lambda given: [original(given)], FP32, everywhere=True).passed
    check = verifier.check(writes, FP32, everywhere=True)
    assert check.reason == "it writes to input 0"
