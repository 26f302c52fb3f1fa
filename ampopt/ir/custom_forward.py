"""Functions of a model that autocast calls in FP32, `torch.amp.custom_fwd(cast_inputs=torch.float32)`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.amp import autocast_mode


@contextlib.contextmanager
def shown_as_under_autocast() -> Iterator[None]:
    """Let an export see what these functions do under autocast, in the block.

    Their decorator casts their inputs and switches autocast off, but only where autocast is on, which it is
    not in an export: the graph would not tell them from other calls. In it both change nothing. Enter it
    within `capturing`, as it replaces a function of the whole process.
    """
    own = torch.is_autocast_enabled

    def is_enabled(*args: Any) -> bool:
        return _casts_to_fp32(sys._getframe(1)) or own(*args)

    torch.is_autocast_enabled = is_enabled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.is_autocast_enabled = own


def _casts_to_fp32(asking: FrameType) -> bool:
    """Whether it is the decorator that asks, of a function whose inputs it casts to FP32."""
    is_decorator = asking.f_globals is vars(autocast_mode) and asking.f_code.co_name == "decorate_fwd"
    return is_decorator and asking.f_locals.get("cast_inputs") is torch.float32
