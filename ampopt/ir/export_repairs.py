"""Repairs of what `torch.export` of PyTorch 2.10 makes of sizes, which change nothing in a newer one."""

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


def _with_states_of_two_dimensions(layer: Callable[..., Any]) -> Callable[..., Any]:
    """One layer of an LSTM, whose states are [batch, channels]."""

    def one_layer_lstm(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        result, states = layer(*args, **kwargs)
        hidden, cell = (state.squeeze(0) if state.dim() == 3 else state for state in states)
        return result, (hidden, cell)

    return one_layer_lstm
