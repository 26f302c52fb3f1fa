"""What decides by values: an index or a condition that is read, and what makes a number of NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.shapes import decides_by_values
from tests.helpers import Model, program_of

X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def _deciding(function: Callable[..., Any], **members: nn.Module) -> str | None:
    node = decides_by_values(program_of(Model(function, **members), X))
    return None if node is None else node.name


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda m, x: x.argmax(1) + 1, "argmax"),
        (lambda m, x: torch.where(x.relu() > 0, x, -x), "gt"),
        (lambda m, x: x.argmax(1), None),
        (lambda m, x: x[:, torch.arange(2) + 1], None),
        (lambda m, x: x.relu() + 1, None),
    ],
)
def test_what_decides_by_values_is_an_index_or_boolean_of_inputs_that_is_read(
    function: Callable[..., Any], found: str | None
) -> None:
    assert _deciding(function) == found


def test_integers_made_of_integer_inputs_decide_nothing_by_values() -> None:
    index = torch.tensor([0, 2])
    model = Model(lambda m, x, index: x[:, index + 1] * (index > 0).view(1, 2, 1, 1))
    assert decides_by_values(program_of(model, X, index - 1)) is None


TAKING_NAN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nan_to_num": lambda y, x: torch.nan_to_num(y),
    "fmax": lambda y, x: torch.fmax(x, y),
    "fmin": lambda y, x: torch.fmin(y, x),
    "nansum": lambda y, x: y.nansum(1),
    "nanmean": lambda y, x: y.nanmean(1),
    "nanmedian": lambda y, x: y.nanmedian(),
    "sign": lambda y, x: y.relu().sign(),
    "heaviside": lambda y, x: torch.heaviside(y, x),
    "copysign": lambda y, x: torch.copysign(x, y),
    "sort": lambda y, x: y.sort(1).values,
    "topk": lambda y, x: y.topk(2, 1).values,
    "kthvalue": lambda y, x: y.kthvalue(1, 1).values,
}


@pytest.mark.parametrize("name", TAKING_NAN)
def test_what_makes_a_number_of_nan_that_others_join_in_decides_by_values(name: str) -> None:
    function = TAKING_NAN[name]
    assert _deciding(lambda m, x: function(m.conv(x), x), conv=nn.Conv2d(3, 3, 1)) == name
    assert _deciding(lambda m, x: function(x.view(2, 3, 16).exp(), x.flatten(2))) is None


def test_inputs_that_are_made_numbers_before_others_join_in_decide_nothing_by_values() -> None:
    conv = nn.Conv2d(6, 2, 3)
    assert (
        _deciding(lambda m, x: m.conv(torch.cat([torch.nan_to_num(x * 2), x.sign()], 1)), conv=conv) is None
    )
    assert _deciding(lambda m, x: torch.nan_to_num(x.chunk(2, 1)[0].clone())) is None
