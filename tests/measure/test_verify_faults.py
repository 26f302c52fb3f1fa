"""Verification with NaN or an infinity in one element of the inputs: it has to reach the outputs still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.lanes import FP32
from ampopt.measure.fault_check import ROUNDINGS_OF_FAULTS, ROUNDINGS_TO_SEE
from ampopt.measure.fault_masks import Masks
from tests.helpers import BF16, Model
from tests.measure.test_verify import SegNet, X, near_ties, permutation
from tests.support.verifying import verifier_of


def swallowing(x: Tensor) -> list[Tensor]:
    return [torch.where(x > 0, x, torch.zeros(()))]  # NaN is not greater than 0


def spreading(x: Tensor) -> list[Tensor]:
    return [x.relu() + 0 * x.sum()]


@pytest.mark.parametrize(
    ("run", "faults", "passes"),
    [
        (swallowing, "keep", False),
        (swallowing, "exact", False),
        (swallowing, "ignore", True),
        (spreading, "keep", True),
        (spreading, "exact", False),
    ],
)
def test_a_fault_in_one_element_stays_one(run: Any, faults: Any, passes: bool) -> None:
    verifier, _ = verifier_of(nn.ReLU(), X, faults=faults)
    check = verifier.check(run, FP32)
    assert check.passed is passes
    assert (check.spread is not None) is (run is spreading and passes)


def test_that_a_fault_spreads_is_explained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, _ = verifier_of(nn.ReLU(), X)
    explained, explain = list[str](), verifier.fault_check.explained

    def noting(lane: Any, draw: Any, found: Any, masks: Any) -> Masks:
        explained.append(draw.name)
        return explain(lane, draw, found, masks)

    monkeypatch.setattr(verifier.fault_check, "explained", noting)
    check = verifier.check(spreading, FP32, everywhere=True)
    assert check.passed
    assert check.spread is not None
    assert len(explained) == 1
    assert verifier.check(lambda x: [x.relu()], FP32, everywhere=True).passed
    assert len(explained) > 2, "there are more draws with faults"


TAKEN_FOR: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "a mask": (lambda x: x > 0, lambda x: ~(x <= 0)),
    "a class": (lambda x: x.argmax(1), lambda x: x.nan_to_num(-9.0).argmax(1)),
    "a truth": (lambda x: x.bool(), lambda x: (x > 0) | (x < 0)),
}


@pytest.mark.parametrize("name", TAKEN_FOR)
def test_what_a_fault_is_taken_for_is_what_eager_takes_it_for(name: str) -> None:
    function, other = TAKEN_FOR[name]
    verifier, original = verifier_of(Model(lambda m, x: function(x)), X)
    assert torch.equal(other(X), function(X))
    assert verifier.check(lambda x: [original(x)], FP32).passed
    check = verifier.check(lambda x: [other(x)], FP32)
    assert "with NaN in one element: " in str(check.reason)
    assert "would be taken for a value" in str(check.reason)
    ignoring, _ = verifier_of(Model(lambda m, x: function(x)), X, faults="ignore")
    assert ignoring.check(lambda x: [other(x)], FP32).passed


IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "a mask of numbers": (lambda x: (x > 0).float(), lambda x: (~(x <= 0)).float()),
    "what is put there": (lambda x: x.nan_to_num(5.0, 9.0), lambda x: x.nan_to_num(0.0, 9.0)),
    "what is put for infinity": (lambda x: x.clamp(max=9.0), lambda x: torch.where(x >= 9.0, 7.0, x)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_put_in_the_place_of_a_fault_is_what_eager_puts_there(name: str) -> None:
    function, other = IN_PLACE[name]
    model = Model(lambda m, x: function(x))
    verifier, original = verifier_of(model, X)
    torch.testing.assert_close(other(X), function(X))
    assert verifier.check(lambda x: [original(x)], FP32).passed
    reason = str(verifier.check(lambda x: [other(x)], FP32).reason)
    assert "in one element: the error " in reason
    assert "would be taken for another value" in reason
    for options in ({"faults": "ignore"}, {"tolerance": 1e38}, {"metric": lambda a, b: 0.0}):
        assert verifier_of(model, X, **options)[0].check(lambda x: [other(x)], FP32).passed


def test_what_rounding_changes_beside_a_fault_is_none() -> None:
    """The place of the fault decides nothing; a tie does, between two numbers that rounding alone moves."""
    row = torch.tensor([[1.0, 1.0, 3.0, 0.0]])
    model = Model(lambda m, x: torch.cat([x[:, 2:3], (x[:, 0] >= x[:, 1]).float()[:, None] * 8], 1))
    verifier, original = verifier_of(model, row)
    spoilt = row.clone()
    spoilt[0, 2] = float("nan")
    other = spoilt + torch.tensor([[-2e-7, 0.0, 0.0, 0.0]])
    assert not torch.equal(original(other)[:, 1], original(spoilt)[:, 1])

    def run(x: Tensor) -> list[Tensor]:
        return [original(other if x[0, 2].isnan() else x)]

    assert verifier.check(run, FP32).passed


def test_an_integer_that_rounding_changes_without_a_fault_is_no_loss() -> None:
    numbers = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0))
    numbers[0, 7] = 0.5  # a bound that one of both reaches, and rounding alone seldom does
    verifier, original = verifier_of(Model(lambda m, x: x >= 0.5), numbers, tolerance=0.1)
    check = verifier.check(lambda x: [x > 0.5], FP32)
    assert torch.equal((numbers > 0.5) ^ original(numbers), numbers == 0.5)
    assert check.passed, check.reason


class Unchecked(nn.Module):
    """Its convolution reads where its input says, and does not look whether that is a number."""

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """The convolved input."""
        out: Tensor = torch.ops.torchvision.deform_conv2d(
            x,
            torch.ones(2, 3, 1, 1),
            offsets,
            x.new_ones(1, 1, 4, 4),
            x.new_zeros(2),
            *(1, 1, 0, 0, 1, 1),
            1,
            1,
            False,
        )
        return out


def test_operators_that_crash_with_nan_are_never_given_any() -> None:
    pytest.importorskip("torchvision")
    offsets, image = torch.randn(1, 2, 4, 4), torch.randn(1, 3, 4, 4)
    verifier, original = verifier_of(Unchecked(), image, offsets)
    given: list[Tensor] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        given.extend(tensors)
        return [original(*tensors)]

    assert verifier.check(run, FP32, everywhere=True).passed
    assert verifier.lost_fault(run, FP32) is None
    assert given
    assert all(bool(tensor.isfinite().all()) for tensor in given)
    assert verifier.note is not None
    assert "what becomes of NaN is not verified: " in verifier.note


def test_a_fault_counts_in_every_lane_with_a_metric_and_with_a_tolerance() -> None:
    for options in ({"metric": lambda a, b: 0.0}, {"tolerance": 0.5}):
        verifier, _ = verifier_of(nn.ReLU(), X, **options)
        for lane in (FP32, BF16):
            assert not verifier.check(swallowing, lane).passed


def test_a_fault_of_another_channel_counts_outside_of_trials() -> None:
    """What is put together of several things may lose a fault of one of them."""
    flow = Model(lambda m, x: x[:, 2:] * 2 + x[:, :2].sum(1, keepdim=True))

    def loses(x: Tensor) -> list[Tensor]:
        return [x[:, 2:] * 2 + x[:, :2].nan_to_num().sum(1, keepdim=True)]

    verifier, original = verifier_of(flow, torch.randn(1, 5, 4, 4))
    assert verifier.check(loses, FP32).passed
    check = verifier.check(loses, FP32, everywhere=True)
    assert "NaN in one element of channel 0 of input 0" in str(check.reason)
    assert verifier.check(lambda x: [original(x)], FP32, everywhere=True).passed
    ignoring, _ = verifier_of(flow, torch.randn(1, 5, 4, 4), faults="ignore")
    assert ignoring.check(loses, FP32, everywhere=True).passed


def test_a_fault_that_eager_hides_itself_need_not_be_kept() -> None:
    verifier, _ = verifier_of(Model(lambda m, x: torch.nan_to_num(x, 0.0, 0.0, 0.0)), X)
    assert verifier.check(lambda x: [torch.nan_to_num(x, 0.0, 0.0, 0.0)], FP32).passed


def unpooled(x: Tensor) -> Tensor:
    pooled, where = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, where, [2, 2])


DECIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "index of a pooling": unpooled,
    "arg-max": lambda x: x.gather(3, x.argmax(3, keepdim=True)),
    "order": lambda x: x.gather(3, x.sort(dim=3).indices),
    "largest": lambda x: x * x.topk(2, dim=3).indices.sum(),
    "comparison": lambda x: torch.where(x > 0.1, x, x - 1),
    "mask from afar": lambda x: x.masked_fill((x.mean(1, keepdim=True) > 0).logical_not(), 0.0),
    "rounded to integers": lambda x: x + x.clamp(-3, 3).nan_to_num().int().abs(),
}


@pytest.mark.parametrize("decides", DECIDING.values(), ids=DECIDING.keys())
def test_where_values_decide_a_fault_may_not_spread(decides: Callable[[Tensor], Tensor]) -> None:
    images = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    verifier, original = verifier_of(Model(lambda m, x: (decides(x), x)), images)

    def spread(x: Tensor) -> list[Tensor]:
        return [y + 0 * x.sum() for y in original(x)]

    check = verifier.check(spread, FP32)
    assert not check.passed
    assert "lose a fault" in str(check.reason)
    assert verifier.check(original, FP32).passed


@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: (x, x.argmax(1)),
        lambda x: x * (torch.arange(8) > 3),
        lambda x: F.max_pool2d(x, 2),
        lambda x: x[:, :, torch.arange(4)].relu(),
    ],
    ids=["given out", "of constants", "unread indices", "constant indices"],
)
def test_where_values_decide_nothing_that_is_read_a_fault_may_spread(harmless: Any) -> None:
    images = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    verifier, original = verifier_of(Model(lambda m, x: harmless(x)), images)

    def spread(x: Tensor) -> list[Tensor]:
        outputs = original(x) if isinstance(original(x), tuple) else (original(x),)
        return [y + 0 * x.sum() if y.is_floating_point() else y for y in outputs]

    check = verifier.check(spread, FP32)
    assert check.passed, check.reason
    assert check.spread is not None


class TwoOfAKind(SegNet):
    """Unpools something else by indices that rounding decides."""

    def forward(self, x: Tensor) -> Tensor:
        """Unpool the mean of a window, which has the fault, at its maximum, which has none."""
        image, fault = x[:, :64], x[:, 64:]
        _, where = F.max_pool2d(self.conv(image), 2, return_indices=True)
        return F.max_unpool2d(F.avg_pool2d(fault, 2), where, [2, 2])


def with_fault_beside(images: Tensor) -> Tensor:
    """65 channels of which verification spoils the last; its middle row is one whose maxima nearly tie."""
    return torch.cat((images.roll((0, 4), (2, 3)), torch.ones_like(images[:, :1])), 1)


@pytest.mark.parametrize("how", ["by rounding", "for no reason"])
def test_nan_that_rounding_alone_moves_is_not_lost_and_other_nan_is(how: str) -> None:
    images = with_fault_beside(near_ties(eager_flips=False))
    verifier, original = verifier_of(TwoOfAKind(), images)
    verifier._fault_draws = [  # in the window whose maxima tie
        type(draw)(draw.name, tuple((_spoilt(images),) for _ in draw.calls)) for draw in verifier._fault_draws
    ]
    if how == "for no reason":
        check = verifier.check(lambda x: [original(x).roll(1, 2)], FP32)
        assert not check.passed
        return

    def reordered(order: Tensor) -> Callable[[Tensor], list[Tensor]]:
        return lambda x: [original(torch.cat((x[:, :64][:, order], x[:, 64:]), 1))]

    reference = ~torch.isfinite(original(_spoilt(images)))
    moved = [
        run
        for run in map(reordered, map(permutation, range(50)))
        if not torch.equal(~torch.isfinite(run(_spoilt(images))[0]), reference)
    ]
    assert moved, "no order of the sum moves the largest"
    assert verifier.lost_fault(moved[0], FP32) is None


def test_a_rounding_that_pytorch_refuses_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*tensors: Tensor) -> list[Tensor]:
        raise RuntimeError("expected scalar type Float but found BFloat16")

    verifier, original = verifier_of(nn.Softplus(), X)
    monkeypatch.setattr(verifier, "runs_rounded_anew", lambda *_, **__: [refused] * 3)
    assert "is over" in str(verifier.check(lambda x: [original(x) * 1.1], FP32).reason)
    assert "would be lost" in str(verifier.lost_fault(lambda x: [original(x).nan_to_num()], FP32))
    assert verifier.largest_jump(FP32, verifier.draws[0], 0) == 0.0
    assert verifier.check(lambda x: [original(x)], FP32).passed


def _spoilt(images: Tensor) -> Tensor:
    made = images.clone()
    made[:, 64, :, 4] = float("nan")
    return made


def test_eager_is_rounded_anew_only_until_what_was_found_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A NaN that rounding moves to one of two places; and one that no rounding moves to where it is found."""
    verifier, _ = verifier_of(nn.ReLU(), X)
    here, there, both, far = (torch.tensor(marks) for marks in ((1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 1)))
    rounded: list[int] = []

    def anew(*_: object, **__: object) -> Iterator[Any]:
        for seed in range(ROUNDINGS_OF_FAULTS):
            rounded.append(seed)
            yield lambda *_, seed=seed: [torch.where((there if seed == 2 else here) > 0, torch.nan, 0.0)]

    monkeypatch.setattr(verifier, "runs_rounded_anew", anew)
    (draw, *_) = verifier._fault_draws
    plain = Masks.of([[here > 0]], [[here > 0]])

    def unexplained(found: Tensor) -> int:
        return verifier.fault_check.explained(FP32, draw, [[found > 0]], plain).unexplained([[found > 0]])

    assert unexplained(here) == len(rounded) == 0
    assert unexplained(there) == 0
    assert rounded == [0, 1, 2]
    assert unexplained(both) == 0
    assert rounded == [0, 1, 2]  # they are known
    assert unexplained(far) > 0
    assert rounded == [*range(ROUNDINGS_TO_SEE)]  # nothing of it was explained
    assert unexplained(there) == 0


def test_what_rounding_explains_slowly_is_given_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, _ = verifier_of(nn.ReLU(), X)
    count = 2 * ROUNDINGS_TO_SEE - 1
    places = torch.eye(count) > 0

    def anew(*_: object, **__: object) -> Iterator[Any]:
        for seed in range(ROUNDINGS_OF_FAULTS):
            yield lambda *_, seed=seed: [torch.where(places[seed % count], torch.nan, 0.0)]

    monkeypatch.setattr(verifier, "runs_rounded_anew", anew)
    (draw, *_) = verifier._fault_draws
    found = [[torch.ones(count) > 0]]
    masks = verifier.fault_check.explained(FP32, draw, found, Masks.of([[torch.zeros(count) > 0]]))
    assert masks.unexplained(found) == 0
    assert masks.roundings == count
