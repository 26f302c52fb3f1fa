"""Where the machine lacks what a capture needs, it is not the model that is blamed."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch
from torch import nn

import ampopt
from ampopt.errors import InputError

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
FULL = OSError(errno.ENOSPC, "No space left on device", "folder/x")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval()


def lacking(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports fail."""

    def export(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("torch.export.export", export)


def test_a_full_disk_is_told_and_the_original_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(FULL, monkeypatch)
    model = net()
    fast = ampopt.optimize(model, X, precision="fp32")
    assert fast.report.notes[0].startswith("the capture of Sequential lacks room on a disk: make some, or ")
    assert "not one graph" not in str(fast.report)
    assert torch.equal(fast(X), model(X))


def test_for_want_of_memory_the_parts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(MemoryError(), monkeypatch)
    model = net()
    fast = ampopt.optimize(model, X, precision="fp32")
    assert fast.report.notes[0].startswith("the capture of Sequential lacks memory: free some, or ")
    assert any(note.startswith("submodule 0 runs as it was: the capture of") for note in fast.report.notes)
    assert "not one graph" not in str(fast.report)
    assert torch.equal(fast(X), model(X))


def test_compare_and_diagnose_tell_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(FULL, monkeypatch)
    with pytest.raises(InputError, match=r"^the capture of Sequential lacks room on a disk"):
        ampopt.compare(net(), X, precision="fp32")
    found = ampopt.diagnose(net(), X, budget_s=3)
    assert any(note.startswith("the capture of Sequential lacks room on a disk") for note in found.notes)
    assert not [each for each in found.findings if each.name == "graph-break"]


def test_a_copy_for_which_memory_is_out_is_no_fault_of_the_model() -> None:
    model = net()
    model.held = Large()  # type: ignore[assignment]
    fast = ampopt.optimize(model, X, precision="fp32")
    assert fast.report.notes[0].startswith("a copy of the model lacks memory: free some, or ")
    assert torch.equal(fast(X), model(X))


class Large:
    """What there is no memory for once more."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Fail."""
        raise MemoryError
