"""A verifier of a model, as many tests need it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ampopt.measure.verify import Verifier
from tests.support.planted import captured_of


def verifier_of(model: nn.Module, *args: Tensor, **options: Any) -> tuple[Verifier, nn.Module]:
    """The verifier of an example call, and the private copy of the model that it compares with."""
    original, captured = captured_of(model, *args)
    return Verifier(original, captured, **options), original
