"""Whose memory a program's results are, and whether its caller's inputs stay as they were.

No error of an output tells: `relu_` in the place of `relu` gives right numbers, and leaves others in the
caller's image; a result that is a view of a weight is right until the caller writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampopt.ir.model_copy import same_tensor
from ampopt.measure.original import HasOperators, Run


class Watched:
    """A function of flat tensors whose calls are watched; `reason` says what is wrong with them first.

    Memory of the program's own shows in the second call; what a compiler does after several calls, in a later
    one.
    With `static`, results may stay where the next call writes its own, as the caller has asked for.
    """

    def __init__(self, run: Run, *, static: bool = False) -> None:
        self.reason: str | None = None
        self.error: Exception | None = None
        """What the function has raised."""
        self._run, self._last, self._static = run, list[Tensor](), static

    @property
    def by_operators(self) -> Run:
        """The function, or what it has for operators that can be seen."""
        return self._run.by_operators if isinstance(self._run, HasOperators) else self._run

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Call the function."""
        before = [tensor.clone() for tensor in tensors]
        try:
            outputs = self._run(*tensors)
        except Exception as error:
            self.error = error
            raise
        self.reason = self.reason or self._why_not_own(tensors, before, outputs)
        if not self._static:
            self._last = list(outputs)  # alive in the next call, so that nothing else gets its memory
        return outputs

    def _why_not_own(
        self, tensors: Sequence[Tensor], before: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> str | None:
        for place, (tensor, kept) in enumerate(zip(tensors, before, strict=True)):
            if not same_tensor(tensor, kept):
                return f"it writes to input {place}"
        for place, output in enumerate(outputs):
            if any(_share_memory(output, tensor) for tensor in tensors):
                return f"output {place} shares memory with an input"
            if any(_share_memory(output, other) for other in self._last):
                return f"output {place} shares memory with an earlier call's"
        return None


def _share_memory(a: Tensor, b: Tensor) -> bool:
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    if not a.layout is b.layout is torch.strided:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
