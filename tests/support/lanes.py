"""What tests of the choice between lanes share: a small network, times that are told, a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.measure.sampling import Measurement
from tests.helpers import with_statistics

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def small_model() -> nn.Module:
    return with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))


def measure_as(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str], float]) -> None:
    """Let the final comparisons find these times, by what is called."""

    def measured(samplers: dict[str, Any], **options: Any) -> dict[str, Measurement]:
        for sampler in samplers.values():
            sampler()
        return {name: Measurement((seconds(name),) * 6) for name in samplers}

    for module in ("search.last_comparison", "measure.headline"):
        monkeypatch.setattr(f"ampopt.{module}.interleave", measured)


class Remembering(nn.Module):
    """It keeps its state itself, from the first call on, in the dtype in which it was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix = nn.Linear(8, 8), nn.Linear(8, 8)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 8) if self.state is None else self.state
        self.state = self.mix(torch.tanh(self.enter(x) + self.mix(state)))
        return self.state
