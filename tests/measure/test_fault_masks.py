"""Masks of what is not finite: of several runs, and what a program loses and adds."""

from __future__ import annotations

import math

import pytest
import torch

from ampopt.measure.fault_masks import (
    Bools,
    Masks,
    joined_elements,
    left_in,
    lost_elements,
    share,
    with_others,
)


def masks(*calls: tuple[str, ...]) -> Bools:
    """A mask for each output of each call: `x` is not finite, `.` is."""
    return [[torch.tensor([mark == "x" for mark in output]) for output in outputs] for outputs in calls]


def marks(found: Bools) -> list[tuple[str, ...]]:
    """Masks as they are written for `masks`."""
    return [
        tuple("".join("x" if b else "." for b in output.tolist()) for output in outputs) for outputs in found
    ]


def test_nan_and_both_infinities_are_left_and_integers_that_eager_has_in_every_precision() -> None:
    values, nothing = torch.tensor([math.nan, 1.0, math.inf, -math.inf, 3e38]), torch.empty(0)
    calls = [(values, torch.tensor([1, 2, 3])), (values.flip(0), torch.tensor([0, 0, 0]))]
    eager = [(nothing, torch.tensor([1, 2, 0])), (nothing, torch.tensor([0, 0, 0]))]
    exact = [(nothing, torch.tensor([1, 7, 0])), (nothing, torch.tensor([0, 0, 5]))]
    assert marks(left_in(calls, eager, exact)) == [("x.xx.", "x.."), (".xx.x", "xx.")]
    assert left_in([], [], []) == []


def test_integers_that_are_others_without_a_fault_too_are_no_loss() -> None:
    found, always = masks(("x.", "x...")), masks(("xx", "xxx."))
    usual, eager = torch.tensor([4, 5, 6, 7]), torch.tensor([4, 9, 6, 9])
    numbers = torch.zeros(2)
    assert marks(with_others(found, always, [(numbers, usual)], [(numbers, eager)])) == [("x.", "xx..")]


def test_runs_that_have_to_agree_mark_what_all_of_them_mark() -> None:
    found = Masks.of(masks(("xx..", "x")), masks(("x.x.", "x")), masks(("xxxx", ".")))
    assert marks(found.always) == [("x...", ".")]
    assert marks(found.ever) == marks(found.always)
    assert found.roundings == 0


def test_another_run_takes_from_what_is_always_marked_and_adds_to_what_ever_is() -> None:
    first = Masks.of(masks(("xx.",), ("...",)))
    second = first.joined_by(masks(("x.x",), ("..x",)))
    assert marks(second.always) == [("x..",), ("...",)]
    assert marks(second.ever) == [("xxx",), ("..x",)]
    third = second.joined_by(masks(("...",), ("xx.",)))
    assert marks(third.always) == [("...",), ("...",)]
    assert marks(third.ever) == [("xxx",), ("xxx",)]
    assert marks(first.always) == marks(first.ever) == [("xx.",), ("...",)]


def test_elements_are_counted_for_one_output_in_all_calls_where_they_are_always_marked() -> None:
    found = Masks(masks(("xx", "..."), ("x.", "x..")), masks(("xx", "xxx"), ("xx", "xxx")))
    assert [found.count(0), found.count(1)] == [3, 1]


def test_lost_is_what_should_be_marked_and_is_not_and_joined_is_the_other_way_round() -> None:
    found = masks(("x..x", ".."), ("....", "xx"))
    expected = masks(("xxx.", ".."), ("x...", "x."))
    assert lost_elements(found, expected) == [3, 0]
    assert joined_elements(found, expected) == [1, 1]
    assert lost_elements(expected, expected) == joined_elements(expected, expected) == [0, 0]


def test_a_share_is_that_of_the_call_where_it_is_largest() -> None:
    found = masks(("x...", "xx"), ("xxx.", ".x"), ("....", ".."))
    assert [share(found, 0), share(found, 1)] == [0.75, 1.0]


@pytest.mark.parametrize("other", [masks(("x", ".")), masks(("x",), ("x",)), []])
def test_masks_of_other_calls_or_outputs_are_refused(other: Bools) -> None:
    one = masks(("x",))
    with pytest.raises(ValueError, match="zip"):
        Masks.of(one).joined_by(other)
    with pytest.raises(ValueError, match="zip"):
        lost_elements(one, other)
    with pytest.raises(ValueError, match="zip"):
        joined_elements(one, other)


def test_what_is_unlike_every_run_is_counted() -> None:
    known = Masks.of(masks(("xx..", "..")), masks(("xx..", "..")))
    assert known.unexplained(masks(("xx..", ".."))) == 0
    assert known.unexplained(masks(("x...", ".x"))) == 2  # one is lost, one has joined
    known = known.joined_by(masks(("x...", "..")))
    assert known.unexplained(masks(("x...", ".x"))) == 1
