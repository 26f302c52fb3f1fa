"""What PyTorch's tracers note of the stack tells the same places in the user's code, and is put back."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._traceback import CapturedTraceback

from ampopt.ir.model_stacks import ModelStack, stacks_within_models

TAKEN = list[tuple[traceback.StackSummary, traceback.StackSummary]]()


def helped(x: Tensor) -> Tensor:
    TAKEN[:] = [(ModelStack.extract().summary(), CapturedTraceback.extract().summary())]
    return x.relu() * 2


class Helped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Call a function that is no `forward`."""
        return helped(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Helped())

    def forward(self, x: Tensor) -> Tensor:
        """Go through PyTorch's own `forward`."""
        return torch.as_tensor(self.inner(x))


def test_a_stack_is_what_there_is_within_the_outermost_forward() -> None:
    Outer()(torch.ones(2))
    ((mine, whole),) = TAKEN
    here = Path(__file__).name
    found = [(frame.name, Path(frame.filename).name) for frame in mine]
    assert found == [("forward", here), ("forward", "container.py"), ("forward", here), ("helped", here)]
    assert mine[0].line == "return torch.as_tensor(self.inner(x))"
    places = [(frame.filename, frame.lineno) for frame in whole]
    assert all((frame.filename, frame.lineno) in places for frame in mine)
    assert len(whole) > len(mine)


def test_outside_of_a_model_there_is_none() -> None:
    helped(torch.ones(2))
    ((mine, whole),) = TAKEN
    assert mine == []
    assert whole


def _noted(model: nn.Module) -> list[list[str]]:
    """For each call its lines in this file."""
    exported = torch.export.export(model, (torch.ones(2),), strict=False)
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    return [re.findall(rf'File "{re.escape(__file__)}", line (\d+)', call.stack_trace) for call in calls]


def test_an_export_notes_what_it_notes_without() -> None:
    plain = _noted(Outer())
    with stacks_within_models():
        assert _noted(Outer()) == plain
    assert len(plain) > 1
    assert all(plain)
    assert len(plain[0]) > 1


def _tracers_class() -> object:
    return vars(torch.fx.proxy)["CapturedTraceback"]


def test_pytorchs_own_class_is_put_back_also_after_an_error() -> None:
    before = _tracers_class()

    def fail() -> None:
        assert _tracers_class() is ModelStack
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"), stacks_within_models():
        fail()
    assert _tracers_class() is before


def test_a_version_without_such_a_class_has_none_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.fx.proxy.CapturedTraceback")
    with stacks_within_models():
        assert not hasattr(torch.fx.proxy, "CapturedTraceback")
    assert not hasattr(torch.fx.proxy, "CapturedTraceback")
