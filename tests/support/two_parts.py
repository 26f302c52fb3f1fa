"""A model of two submodules that is not one graph, optimized with few passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.measure.ledger import Ledger
from ampopt.search import lower_parts, parts_search
from tests.helpers import with_statistics
from tests.support import snapshot
from tests.support.planted import keep_the_patched, optimize

PASSES = ["fold-conv-bn", "bake-autocast"]
X = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0)).abs()


def are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is compared with its former self is twice as fast, and every submodule is worth a try.

    None is optimized in both lanes at once.
    """
    keep_the_patched(monkeypatch)
    monkeypatch.setattr(parts_search, "MAIN", 2.0)
    monkeypatch.setattr(lower_parts, "LEAST_S", 0.0)  # however busy the machine is
    monkeypatch.setattr(lower_parts, "LEAST", 0.0)


def body(channels: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


class Tolerant(nn.Module):
    """Two submodules with a branch between them that no rounding changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = body()
        self.second: nn.Module = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The features, shaded where they are far too bright."""
        y = self.first(x)
        if y.mean().item() > 1e6:
            y = y * 0.5
        return self.second(y)  # type: ignore[no-any-return]


def made(model: nn.Module, keep: Sequence[str] = (), **options: Any) -> Any:
    with_statistics(model)
    before = snapshot.of_model(model), snapshot.of_torch()
    fast = optimize(model, X, cache=False, passes=[*PASSES, *keep], **options)
    assert snapshot.differences(before[0], snapshot.of_model(model)) == []
    assert snapshot.differences(before[1], snapshot.of_torch()) == []
    return fast


def lanes_of(report: Ledger) -> dict[str, str | None]:
    return {name: region.chosen for name, region in report.regions.items()}


def notes_on(report: Ledger, name: str) -> list[str]:
    return [note for note in report.notes if note.startswith(f"submodule {name} stays in FP32: in amp ")]
