"""Results of a part lie in memory as those of its own code: the code around it may write to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.planted import keep_the_patched, optimize

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).abs()

Results = tuple[Tensor, Tensor]


class Part(nn.Module):
    """Features, and something that lies in memory as a test wants it."""

    def __init__(self, view: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.view = nn.Conv2d(3, 3, 3, padding=1), view
        self.offset = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Results:
        """The features, and the view."""
        y = self.conv(x)
        return y, self.view(x, y, self.offset)


class Writing(nn.Module):
    """Writes to what its part gives, where the image is bright."""

    def __init__(
        self, view: Callable[[Tensor, Tensor, Tensor], Tensor], crop: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.part, self.crop = Part(view), crop

    def forward(self, x: Tensor) -> list[Any]:
        """The input, the results, and their strides."""
        x = self.crop(x * 1)
        y, view = self.part(x)
        if x.mean().item() > 3:
            view.reshape(-1)[::2] = 0  # to a copy, where it is not contiguous
            view.mul_(2)
        return [x + 0, y + 0, view + 0, self.part(x)[0], *map(float, view.stride())]


VIEWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a part of the input": lambda x, y, w: x[:, :1],
    "the input": lambda x, y, w: x,
    "a part of another result": lambda x, y, w: y[:, 1:],
    "another result, transposed": lambda x, y, w: y.mT,
    "a weight": lambda x, y, w: w,
    "transposed": lambda x, y, w: (y * 2).mT,
    "channels last": lambda x, y, w: (y * 2).contiguous(memory_format=torch.channels_last),
    "contiguous": lambda x, y, w: y * 2,
}
CROPS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "crop": lambda x: x[:, :, 1:6, 2:7],
    "subsampled": lambda x: x[..., ::2, ::2],
}


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("view", VIEWS)
def test_what_the_model_writes_to_a_result_reaches_what_it_would(
    view: str, crop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_the_patched(monkeypatch)
    torch.manual_seed(0)
    model = Writing(VIEWS[view], CROPS[crop]).eval()
    fast = optimize(model, X, precision="fp32", passes=["fold-conv-bn"], cache=False, budget_s=20.0)
    assert list(fast.report.regions)[:1] == ["part"], fast.report.notes
    with torch.no_grad():
        for image in (X, X + 10):
            torch.testing.assert_close(fast(image), model(image))


def test_elements_that_overlap_otherwise_than_by_expand_leave_a_part_alone() -> None:
    windows: Any = Writing(lambda x, y, w: (y * 2).unfold(3, 4, 1), lambda x: x).eval()
    fast = optimize(windows, X, precision="fp32", passes=["fold-conv-bn"], cache=False, budget_s=10.0)
    assert any(
        "part is not one graph: elements of a result of it share memory" in n for n in fast.report.notes
    )
