"""The settings of a program: everything is set inside, whatever surrounds the call, and put back after it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from ampopt.ir.settings import Settings

CPU = torch.device("cpu")


def state() -> tuple[bool, bool, bool, torch.dtype]:
    """Gradients, inference mode, autocast and its dtype, as they surround a computation."""
    autocast = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.get_autocast_dtype("cpu"),
    )


@pytest.mark.parametrize("wanted", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "around",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
    ],
)
def test_a_scope_holds_whatever_surrounds_it(around: Any, wanted: torch.dtype | None) -> None:
    with around():
        before = state()
        with Settings().scope(CPU, wanted):
            grad, inference, autocast, dtype = state()
            assert (grad, inference, autocast) == (False, False, wanted is not None)
            assert wanted is None or dtype is wanted
            made = torch.ones(2) @ torch.ones(2)
            assert not made.is_inference()
            assert made.dtype is (wanted or torch.float32)
        assert state() == before


def test_an_error_puts_everything_back() -> None:
    before = state()
    with torch.inference_mode(), pytest.raises(KeyError), Settings().scope(CPU, torch.bfloat16):
        raise KeyError
    assert state() == before
