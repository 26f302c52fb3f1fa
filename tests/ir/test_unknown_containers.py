"""What PyTorch cannot take apart is told by its class, with what makes it known."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.unknown_containers import unknown_container
from tests.helpers import Model
from tests.support.planted import captured_of

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Unknown:
    scores: Tensor
    kind: str = "rows"


@dataclasses.dataclass
class Known:
    scores: Tensor
    kind: str = "rows"


torch.export.register_dataclass(Known)


@dataclasses.dataclass(frozen=True)
class Setting:
    rate: int = 30


@dataclasses.dataclass
class Slotted:
    __slots__ = ("scores",)
    scores: Tensor


class Plain:
    def __init__(self, scores: Tensor) -> None:
        self.found = {"scores": [scores]}


class Named(NamedTuple):
    scores: Tensor


def model(result: Callable[[Tensor], Any]) -> nn.Module:
    return Model(lambda m, x: result(m.layer(x)), layer=nn.Linear(4, 4)).eval()


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (Unknown, r"a dataclass that PyTorch does not know: torch\.export\.register_dataclass\(Unknown\)"),
        (Slotted, r"register_dataclass\(Slotted\)"),
        (lambda y: [y, {"more": (Unknown(y),)}], r"register_dataclass\(Unknown\)"),
        (Plain, "an object of the class Plain, which PyTorch cannot take apart"),
        (lambda y: types.SimpleNamespace(y=y), "an object of the class SimpleNamespace"),
        (lambda y: (y, Setting()), r"register_dataclass\(Setting\)"),
    ],
)
def test_a_result_is_told_by_its_class(made: Callable[[Tensor], Any], told: str) -> None:
    with pytest.raises(CaptureError, match=f"its result holds .*{told}"):
        captured_of(model(made), X)


@pytest.mark.parametrize(
    ("made", "told"), [(Unknown, r"register_dataclass\(Unknown\)"), (Plain, "class Plain")]
)
def test_an_argument_is_told_by_its_class(made: Callable[[Tensor], Any], told: str) -> None:
    takes = Model(lambda m, given: m.layer(vars(given).get("scores", X)), layer=nn.Linear(4, 4)).eval()
    with pytest.raises(CaptureError, match=f"Model is called with .*{told}"):
        captured_of(takes, made(X))


@pytest.mark.parametrize("made", [Known, Named, lambda y: [{"y": y}, 3, None]])
def test_what_is_known_is_one_graph(made: Callable[[Tensor], Any]) -> None:
    original = model(made)
    _, captured = captured_of(original, X)
    expected = original(X)
    held = (
        expected.scores
        if isinstance(expected, (Known, Named))
        else torch.utils._pytree.tree_leaves(expected)[0]
    )
    assert torch.allclose(captured.program.run(X)[0], held, atol=1e-6)


class Kind(Setting, enum.Enum):
    FAST = 60


def marked() -> None:
    """A function with an attribute."""


marked.tensor = X  # type: ignore[attr-defined]


def test_modules_classes_functions_and_members_of_an_enumeration_are_no_containers() -> None:
    assert (
        unknown_container([X, nn.Linear(2, 2), Unknown, Kind.FAST, marked, 3, "word", None, [].append])
        is None
    )
