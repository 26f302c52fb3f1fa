"""Repairs of PyTorch for captures: sizes in exports of 2.10, and masks that are asked for their values."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


@contextlib.contextmanager
def right_sizes() -> Iterator[None]:
    """Let exports in the block give poolings and LSTMs the sizes that they have, for all sizes of an image.

    PyTorch 2.10 rounds a pooling's size down in two steps, and the second asks whether the first left a rest:
    an export is then valid for such heights and widths alone, and not for a range. The states of an LSTM get
    one dimension more than they have, for batches of more than one. Enter it within `capturing`: the
    functions are the whole process's.
    """
    from torch import _meta_registrations as shapes
    from torch._decomp import decompositions

    with contextlib.ExitStack() as undo:
        for module, name, repaired in (
            (shapes, "div_rtn", lambda _: operator.floordiv),  # Python's rounds down by itself
            (decompositions, "one_layer_lstm", _with_states_of_two_dimensions),
        ):
            if (before := getattr(module, name, None)) is not None:
                undo.callback(setattr, module, name, before)
                setattr(module, name, repaired(before))
        yield


@contextlib.contextmanager
def masks_as_given() -> Iterator[None]:
    """Let transformers in the block use the masks that they are given, and not ask whether they are causal.

    `nn.TransformerEncoder` and `nn.TransformerDecoder` compare the values of a mask with those of a causal
    one, and no graph can hold the answer. It is a hint: without it the mask itself is used, for the same
    results (`torch.nn.modules.transformer`, 2.10 to 2.14). A hint of the caller's is kept. Enter it within
    `capturing`.
    """
    from torch.nn.modules import transformer

    module: Any = transformer
    if (detect := getattr(module, "_detect_is_causal_mask", None)) is None:
        yield
        return

    def told(_mask: Tensor | None, is_causal: bool | None = None, *_: object) -> bool:
        return bool(is_causal)

    module._detect_is_causal_mask = told
    try:
        yield
    finally:
        module._detect_is_causal_mask = detect


def _with_states_of_two_dimensions(layer: Callable[..., Any]) -> Callable[..., Any]:
    """One layer of an LSTM, whose states are [batch, channels]."""

    def one_layer_lstm(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        result, states = layer(*args, **kwargs)
        hidden, cell = (state.squeeze(0) if state.dim() == 3 else state for state in states)
        return result, (hidden, cell)

    return one_layer_lstm
