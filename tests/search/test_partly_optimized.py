"""What serves for a model that is not one graph: its code, with parts in their places."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ampopt.measure.entry import ORIGINAL
from ampopt.measure.ledger import Ledger
from ampopt.search.partly_optimized import patched


def test_a_submodule_for_which_nothing_is_faster_is_part_of_the_code_around_it() -> None:
    """Its report and its bundle stay; what serves has no wrapper in its place."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            return y * 2 if y.sum() > -100 else y

    report = Ledger("first", {}, (), chosen=ORIGINAL)
    faster = Ledger("first", {}, (), chosen="fp32")
    model = Branching().eval()
    for own, is_patched in ((report, False), (faster, True)):
        stand_in: Any = type("Part", (nn.Identity,), {"report": own, "layouts": None})()
        assert ("forward" in vars(patched(model, {"first": stand_in}).first)) == is_patched
