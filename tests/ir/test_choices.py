"""Choices by values: seen in one run, followed in another, and what they may be rounded by."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.ir.choice_roundings import SAMPLES, Roundings, distance
from ampopt.ir.choices import Choice, FollowedChoices, seen_in

X = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1))

CHOOSERS: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: x.topk(3),
    "topk along the first": lambda x: x.topk(2, dim=0),
    "topk of all": lambda x: x.topk(7),
    "the least, unsorted": lambda x: x.topk(3, -2, largest=False, sorted=False),
    "sort": lambda x: x.sort(descending=True),
    "stable sort": lambda x: torch.sort(x, dim=1, stable=True),
    "argsort": lambda x: x.argsort(1),
    "stable argsort": lambda x: torch.argsort(x, dim=0, stable=True),
    "max": lambda x: x.max(1),
    "max, kept": lambda x: x.max(0, keepdim=True),
    "min": lambda x: x.min(-1),
    "argmax of all": lambda x: x.argmax(),
    "argmax of all, kept": lambda x: x.argmax(keepdim=True),
    "argmax": lambda x: x.argmax(-2),
    "argmax, kept": lambda x: x.argmax(-2, keepdim=True),
    "argmin": lambda x: x.argmin(2),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "kthvalue, kept": lambda x: x.kthvalue(2, 1, keepdim=True),
    "median": lambda x: x.median(1),
    "argmax of one dimension": lambda x: x[0, 2].argmax(),
    "max of one dimension": lambda x: x[0, 2].max(0),
}


def parts(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("name", CHOOSERS)
def test_places_of_one_run_are_taken_in_another(name: str) -> None:
    choose = CHOOSERS[name]
    result, (choice,) = seen_in(lambda: choose(X), with_rows=True)
    mode = FollowedChoices([choice])
    with mode, warnings.catch_warnings(action="error"):
        followed = choose(OTHER.double())
        (follow,) = mode.follows
        assert follow.others <= follow.moved
    assert mode.is_done
    assert follow.is_valid
    assert follow.moved > 0
    assert follow.roundings is not None
    assert follow.roundings.largest > 0
    assert torch.equal(parts(followed)[-1], parts(result)[-1])
    assert [each.shape for each in parts(followed)] == [each.shape for each in parts(result)]
    if len(parts(followed)) == 2:
        assert not torch.equal(parts(followed)[0], parts(choose(OTHER.double()))[0])


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x[0, 0, 0].argmax(),
        lambda x: x[:0].topk(2),
        lambda x: x.topk(0),
        lambda x: x.max(),
        lambda x: (10 * x).long().topk(2),
    ],
)
def test_what_takes_no_place_of_several_numbers_is_no_choice(choose: Callable[[Tensor], Any]) -> None:
    assert seen_in(lambda: choose(X))[1] == []


def followed_at(rows: Tensor, places: list[list[int]], choose: Callable[[Tensor], Any]) -> bool:
    """Whether these places are valid ones of an operator."""
    (choice,) = seen_in(lambda: choose(rows))[1]
    mode = FollowedChoices([Choice(choice.key, torch.tensor(places))])
    with mode:
        choose(rows)
    return mode.follows[0].is_valid


ROWS = torch.tensor([[3.0, 1.0, 3.0, 2.0]])


@pytest.mark.parametrize("places", [[[0, 0]], [[0, 4]], [[-1, 0]]])
def test_places_that_are_none_or_taken_twice_are_not_valid(places: list[list[int]]) -> None:
    assert not followed_at(ROWS, places, lambda x: x.topk(2))
    assert followed_at(ROWS, [[2, 0]], lambda x: x.topk(2))


def test_of_equal_values_the_first_is_taken_where_that_is_defined() -> None:
    for choose in (lambda x: x.argmax(1), lambda x: x.max(1), lambda x: (-x).min(1)):
        assert followed_at(ROWS, [[0]], choose)
        assert not followed_at(ROWS, [[2]], choose)

    def stable(x: Tensor) -> Any:
        return torch.sort(x, dim=1, descending=True, stable=True)

    assert followed_at(ROWS, [[0, 2, 3, 1]], stable)
    assert not followed_at(ROWS, [[2, 0, 3, 1]], stable)
    for choose in (
        lambda x: x.sort(1, descending=True),
        lambda x: torch.ops.aten.sort.stable(x, stable=False, dim=1, descending=True),
    ):
        assert followed_at(ROWS, [[2, 0, 3, 1]], choose)


def test_choices_that_the_other_run_did_not_make_are_made_as_ever() -> None:
    _, choices = seen_in(lambda: X.topk(2))
    mode = FollowedChoices(choices)
    with mode:
        assert torch.equal(OTHER.topk(3)[1], OTHER.topk(3).indices)
        assert torch.equal(OTHER.topk(2)[1], choices[0].places)
        more = OTHER.topk(2)[1]
    assert mode.is_done
    assert torch.equal(more, OTHER.topk(2)[1])
    with FollowedChoices([*choices, *choices]) as mode:
        OTHER.topk(2)
    assert not mode.is_done


def allowed(theirs: Tensor, rows: Tensor, k: int) -> Tensor:
    """What the k largest values of each row may be rounded by."""
    values, places = rows.topk(k)
    return Roundings.of(theirs, rows, (theirs.topk(k)[1], places)).of_values(values.abs())


def test_what_a_mask_writes_allows_nothing() -> None:
    rows = torch.tensor([[0.5, 0.25, -1e9, -1e9]], dtype=torch.float64)
    for mask in (-1e9, -1e30, torch.finfo(torch.float64).min):
        masked = torch.where(rows < -1, mask, rows)
        theirs = torch.where(rows < -1, mask * 0.99, rows * 1.01)
        assert allowed(theirs, masked, 4)[0, :2].max() < 0.01
    assert distance(torch.tensor([-float("inf"), 1.0]), torch.tensor([-float("inf"), 0.5])) == 0.5


def test_a_row_of_larger_values_allows_others_no_more() -> None:
    rows = torch.tensor([[1e4, 9e3, 8e3], [1.0, 0.9, 0.8]], dtype=torch.float64)
    found = allowed(rows * 1.01, rows, 2)
    assert found[0].min() > 80
    assert found[1].max() <= 0.0101


def test_small_values_are_rounded_as_small_ones_are_where_enough_tell_that() -> None:
    small = torch.linspace(1e-4, 2e-4, SAMPLES, dtype=torch.float64)
    rows = torch.cat([torch.tensor([0.9, 0.8], dtype=torch.float64), small])[None]
    found = allowed(rows * 1.01, rows, rows.shape[1])
    assert found[0, 0] > 8e-3
    assert found[0, 2:].max() < 1e-5
    few = allowed(rows[:, :4] * 1.01, rows[:, :4], 4)
    assert few[0, 2:].min() > 8e-3
