"""Options of passes: what fits its annotation and range passes, all else is refused with what is allowed."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch

from ampopt.errors import InputError
from ampopt.ir.pass_options import check_option, check_options, option
from ampopt.passes import PIPELINE, Degroup, Script
from ampopt.search.options import Options
from tests.support.planted import Planted

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Own(Planted):
    """A pass with options of every kind."""

    count: int = option(4, 1, 8)
    ratio: float = option(0.5, 0.0, 1.0)
    most: int | None = None
    mode: Literal["fast", "small"] = "fast"
    flag: bool = False
    pairs: tuple[tuple[str, int], ...] = ()
    dtype: torch.dtype = torch.float32


@dataclasses.dataclass(frozen=True)
class Unresolved(Planted):
    """A pass whose annotations are for type checkers only."""

    sizes: Sequence[int] = (1, 2)
    limit: Sequence[int] | None = None


OWN = Own("own")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 1), ("count", 8), ("count", np.int64(2)), ("ratio", 0), ("ratio", np.float32(1)),
        ("most", None), ("most", 3), ("mode", "small"), ("flag", True), ("pairs", ()),
        ("pairs", (("a", 1), ("b", 2))), ("dtype", torch.int8),
    ],
)  # fmt: skip
def test_a_value_of_its_kind_and_range_passes(name: str, value: Any) -> None:
    check_option(OWN, name, value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "own's option count is 0: give one such as 4, from 1 to 8"),
        ("count", 10**8, "own's option count is 100000000: give one such as 4, from 1 to 8"),
        ("count", True, "own's option count is true: give one such as 4, from 1 to 8"),
        ("count", 2.0, "own's option count is 2.0: give one such as 4, from 1 to 8"),
        ("ratio", math.nan, "own's option ratio is NaN: give one such as 0.5, from 0 to 1"),
        ("ratio", "x", "own's option ratio is x: give one such as 0.5, from 0 to 1"),
        ("most", "x", "own's option most is x: give a whole number or none"),
        ("mode", "slow", "own's option mode is slow: give one such as fast"),
        ("flag", 1, "own's option flag is 1: give one such as false"),
        ("pairs", (("a", "b"),), 'own\'s option pairs is [["a", "b"]]: give one such as []'),
        ("pairs", (1,), "own's option pairs is [1]: give one such as []"),
        ("dtype", "int8", "own's option dtype is int8: give one such as torch.float32"),
    ],
)
def test_any_other_value_is_refused_with_what_is_allowed(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_option(OWN, name, value)
    assert str(caught.value) == message


def test_where_annotations_cannot_be_read_the_default_tells_the_type() -> None:
    step = Unresolved("mine")
    check_options(dataclasses.replace(step, sizes=(3,), limit=[3]))
    with pytest.raises(InputError, match="option sizes is x: give one such as"):
        check_option(step, "sizes", "x")


def test_choices_are_pairs_of_texts_or_none() -> None:
    check_options(Degroup(choices=(("conv2d", "split"),)))
    with pytest.raises(
        InputError, match=r"degroup's option choices is 5: give a list of \[a text, a text\] or none"
    ):
        check_options(Degroup(choices=5))  # type: ignore[arg-type]


def test_the_defaults_of_all_passes_are_allowed_and_what_runs_for_ever_is_not() -> None:
    for step in PIPELINE:
        check_options(step)
    for wrong in (
        Script(warm_ups=-1),
        Script(warm_ups=10**8),
        Degroup(least_gain=-1),
        Degroup(least_gain=math.nan),
    ):
        with pytest.raises(InputError, match="give one such as"):
            check_options(wrong)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("name", 5, "5: let it be a text"),
        ("numerics", "bitwise", "'bitwise': let it be one of Numerics"),
        ("numerics", None, "None: let it be one of Numerics"),
        ("family", "rewrite", "'rewrite': let it be one of Family"),
        ("portable", "yes", "'yes': let it be True or False"),
        ("shape_dependent", 1, "1: let it be True or False"),
        ("enables_others", None, "None: let it be True or False"),
    ],
)
def test_an_attribute_of_a_pass_that_is_something_else_is_refused(name: str, value: Any, words: str) -> None:
    step = type("Odd", (Planted,), {name: value})("odd")
    for refuse in (lambda: check_options(step), lambda: Options(passes=[step])):
        with pytest.raises(InputError, match=f"^Odd.{name} is {words}$"):
            refuse()
