"""Exports to ONNX trace a graph again and again, without asking each time where in Python they are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_CONFIG = "torch.fx.config"
_SWITCH = "do_not_emit_stack_traces"


@contextlib.contextmanager
def without_stacks() -> Iterator[None]:
    """Let PyTorch's tracers write no stacks of Python's frames to the nodes that they make, in the block.

    They are of ours and of PyTorch's code, since it is a graph that is traced; where in the user's code its
    nodes come from is in their origins, which are handed on. Of the export of a model whose sizes vary they
    took a tenth of the time. Enter it within `capturing`: the switch is the whole process's.
    """
    config = sys.modules.get(_CONFIG)
    if not hasattr(config, _SWITCH):  # of another version
        yield
        return
    before = getattr(config, _SWITCH)
    setattr(config, _SWITCH, True)
    try:
        yield
    finally:
        setattr(config, _SWITCH, before)
