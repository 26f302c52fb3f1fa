"""Whose memory a program's results are, and whether its caller's inputs stay as they were.

No error of an output tells: `relu_` in the place of `relu` gives right numbers, and leaves others in the
caller's image; a result that is a view of a weight, or of another result, is right until the caller writes to
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ampopt.ir.aliases import joined, share_memory
from ampopt.ir.model_copy import same_tensor
from ampopt.measure.original import HasOperators, Run


class Ways(NamedTuple):
    """What a function does with the memory of its caller, and with that of its results: see `Watched`."""

    reason: str | None
    joined: frozenset[tuple[int, int]]


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
        self.joined: set[tuple[int, int]] = set()
        """Pairs of outputs that have had elements in the same memory."""
        self._run, self._last, self._static = run, list[Tensor](), static

    @property
    def ways(self) -> Ways:
        """What was seen until now, without the tensors."""
        return Ways(self.reason, frozenset(self.joined))

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
        self.joined |= joined(outputs, but=self.joined)
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
            if any(share_memory(output, tensor) for tensor in tensors):
                return f"output {place} shares memory with an input"
            if any(share_memory(output, other) for other in self._last):
                return f"output {place} shares memory with an earlier call's"
        return None
