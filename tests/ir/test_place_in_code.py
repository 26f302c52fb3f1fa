"""A model that cannot be captured is refused with the line of its code that is in the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.place_in_code import place_in_code
from tests.support.planted import captured_of


def _level(x: Tensor) -> Any:
    return x.mean().item()


class Branching(nn.Module):
    """One that decides in a function that it calls."""

    def forward(self, x: Tensor) -> Tensor:
        """Doubled where it is bright."""
        return x * 2 if _level(x) > 0 else x


class Listing(nn.Module):
    """One with a loop over what it has found."""

    def forward(self, x: Tensor) -> Any:
        """The sum of bright elements."""
        total = 0.0
        for value in x[x > 0].tolist():
            total += value
        return x * total


class Numbering(nn.Module):
    """One that leaves PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        """Through an array."""
        return x * json.loads(str(x.numpy().sum()))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (Branching(), "return x * 2 if _level(x) > 0 else x"),
        (Listing(), "for value in x[x > 0].tolist():"),
        (Numbering(), "return x * json.loads(str(x.numpy().sum()))"),
    ],
    ids=["a branch", "a list", "an array"],
)
def test_the_line_of_the_models_code_is_named(model: nn.Module, line: str) -> None:
    with pytest.raises(CaptureError) as caught:
        captured_of(model, torch.rand(3))
    code = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = 1 + next(place for place, each in enumerate(code) if each.strip().startswith(line))
    told = f'torch.export cannot capture {type(model).__name__}, because of test_place_in_code.py:{number}, "'
    assert str(caught.value).startswith(told + line)


def test_what_comes_through_no_code_of_a_model_has_no_place() -> None:
    assert place_in_code(ValueError("never raised")) is None
    try:
        raise ZeroDivisionError from ValueError("no place either")
    except ZeroDivisionError as error:
        here = place_in_code(error)
    assert here is not None
    assert here.endswith('"raise ZeroDivisionError from ValueError("no place either")"')
