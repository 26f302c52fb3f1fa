"""Norms that normalize by their input and move their statistics in evaluation, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def training(kind: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A norm of a kind that `eval()` leaves in training mode, as for adaptation at test time."""

    class Adapting(kind):  # type: ignore[misc, valid-type]
        def train(self, mode: bool = True) -> Any:
            """Stay in training."""
            return super().train(True)

    Adapting.__name__ = f"Adapting{kind.__name__}"
    norm: nn.Module = Adapting(*args, **options)
    with torch.no_grad():
        for weight in norm.parameters():
            weight.add_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)))
    return norm
