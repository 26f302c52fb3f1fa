"""What decides by values: an index or a condition that is read, and what makes a number of NaN."""

from __future__ import annotations

import functools
import itertools
import math
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
    "fake_quantize_per_tensor_affine": lambda y, x: torch.fake_quantize_per_tensor_affine(y, 0.1, 0, 0, 9),
}


MODES = list(itertools.product(["bilinear", "nearest", "bicubic"], ["zeros", "border", "reflection"]))


@pytest.mark.parametrize(("mode", "padding"), [*MODES, ("volume", "zeros")])
def test_places_that_are_computed_decide_by_values_where_nan_is_some_place(mode: str, padding: str) -> None:
    sample = functools.partial(
        torch.nn.functional.grid_sample,
        mode="bilinear" if mode == "volume" else mode, padding_mode=padding, align_corners=False,
    )  # fmt: skip

    def whole(x: Tensor) -> Tensor:
        return x.unsqueeze(2).repeat(1, 1, 3, 1, 1) if mode == "volume" else x

    def grid(y: Tensor) -> Tensor:
        places = y.movedim(1, -1).tanh()
        return places.unsqueeze(1) if mode == "volume" else places[..., :2]

    nowhere = sample(whole(X), grid(torch.full_like(X, math.nan)))
    decides = None if nowhere.isnan().all() else "grid_sampler"
    conv = nn.Conv2d(3, 3, 1)
    assert _deciding(lambda m, x: sample(whole(x), grid(m.conv(x))), conv=conv) == decides
    assert _deciding(lambda m, x: sample(whole(m.conv(x)), grid(X)), conv=conv) is None


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
