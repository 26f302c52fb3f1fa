"""`torch.export` notes where in the user's code a call is made, without reading all frames of the process."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_OF_PYTORCH = str(Path(torch.__file__).parent) + os.sep

_MODULE, _NAME = "torch.fx.proxy", "CapturedTraceback"


class ModelStack:
    """The part of `torch.utils._traceback.CapturedTraceback` that PyTorch's tracers use.

    They ask for the stack at every call, and keep of it what is within the outermost `forward`. PyTorch's
    class describes all frames, with their lines of code: a fifth of an export from deep within a program.
    """

    def __init__(self, innermost: FrameType) -> None:
        self._innermost = innermost

    @classmethod
    def extract(cls) -> ModelStack:
        """The stack of the caller."""
        return cls(sys._getframe(1))

    def summary(self) -> traceback.StackSummary:
        """The frames from the outermost `forward` on; of PyTorch's own those alone that are a `forward`."""
        kept, last, frame = list[FrameType](), 0, self._innermost
        while frame is not None:
            code = frame.f_code
            is_forward = code.co_name == "forward"
            if is_forward or not code.co_filename.startswith(_OF_PYTORCH):
                kept.append(frame)
                last = len(kept) if is_forward else last
            frame = frame.f_back  # type: ignore[assignment]
        found = [(frame.f_code, frame.f_lineno) for frame in reversed(kept[:last])]
        return traceback.StackSummary.from_list(
            [
                traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)
                for code, line in found
            ]
        )


@contextlib.contextmanager
def stacks_within_models() -> Iterator[None]:
    """Let PyTorch's tracers read stacks as `ModelStack` has them, in the block.

    Enter it within `capturing`: the tracers are the whole process's.
    """
    tracers = sys.modules.get(_MODULE)
    before = getattr(tracers, _NAME, None)
    if before is None:  # of another version
        yield
        return
    setattr(tracers, _NAME, ModelStack)
    try:
        yield
    finally:
        setattr(tracers, _NAME, before)
