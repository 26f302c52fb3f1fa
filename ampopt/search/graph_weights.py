"""The weights that a compiled graph was made for, and whether a call comes with the same values.

A tensor's version counter counts most writes to it, but not those of batch norm in training to its running
statistics, of fused optimizers, of `weight.data`, of NumPy and of other processes. So a few values of each
weight are compared in each call, too: of vectors, such as statistics, all up to `MOST_OF_A_VECTOR`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ampopt.ir.signature import without_repetitions

MOST_OF_A_VECTOR = 4096
"""Number of values of a vector that are compared in each call."""

SAMPLED = 16
"""Number of values of another weight that are compared in each call, from its middle: the first rows may be
padding, which no optimizer changes. What an expanded tensor repeats is one value."""


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A constant, the place of the input that it was, and what tells whether it is the same."""

    place: int
    tensor: Tensor
    version: int
    address: int

    @classmethod
    def of(cls, place: int, tensor: Tensor) -> _Weight:
        return cls(place, tensor, tensor._version, tensor.data_ptr())

    def is_now(self, given: Tensor) -> bool:
        """Whether an input is this tensor, and nothing that is counted was written to it."""
        own = self.tensor
        return given is own and own._version == self.version and own.data_ptr() == self.address


class GraphWeights:
    """Tensors by their places among a graph's inputs, as they are now."""

    def __init__(self, weights: Mapping[int, Tensor]) -> None:
        self._weights = [_Weight.of(place, tensor) for place, tensor in weights.items()]
        self._runs: list[Tensor] = []
        """The bytes of values that lie one after another, in the weights' own memory."""
        self._scattered: list[tuple[Tensor, Tensor]] = []
        """A weight's memory, and the places in it of values that do not."""
        for tensor in weights.values():
            if tensor.numel() and not tensor.is_quantized:
                self._add_sample(tensor)
        self._samples = self._values() if self._runs or self._scattered else None

    def are_now(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a call's inputs have these tensors at their places, and nothing was written to them."""
        if not all(weight.is_now(inputs[weight.place]) for weight in self._weights):
            return False
        if self._samples is None or (self._samples.is_cuda and torch.cuda.is_current_stream_capturing()):
            return True  # the host cannot wait for values while it captures
        return torch.equal(self._values(), self._samples)

    def _values(self) -> Tensor:
        """The bytes of all samples, as they are now."""
        if not self._scattered:
            return torch.cat(self._runs)
        taken = [memory.index_select(0, places).view(torch.uint8) for memory, places in self._scattered]
        return torch.cat([*self._runs, *taken])

    def _add_sample(self, tensor: Tensor) -> None:
        """Sample a weight from its middle: in its memory if that has no gaps, else in its own order."""
        once = without_repetitions(_without_bits(tensor.detach()))
        count = min(MOST_OF_A_VECTOR if once.dim() <= 1 else SAMPLED, once.numel())
        skipped = (once.numel() - count) // 2
        if torch.ops.aten.is_non_overlapping_and_dense(once):
            run = once.as_strided((count,), (1,), once.storage_offset() + skipped)
            self._runs.append(run.view(torch.uint8))
            return
        places = _places(once, range(skipped, skipped + count))
        memory = once.as_strided((max(places) + 1,), (1,), 0)
        if memory.element_size() == 1:  # PyTorch selects no elements of some small dtypes
            memory = memory.view(torch.uint8)
        self._scattered.append((memory, torch.tensor(places, device=once.device)))


def _without_bits(tensor: Tensor) -> Tensor:
    """A tensor's memory as it is: a negative or a conjugate bit says how it is to be read."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _places(tensor: Tensor, numbers: range) -> list[int]:
    """Where elements of a tensor lie in its memory, by their numbers in its own order."""
    sizes_and_strides = [*zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True)]
    found = []
    for number in numbers:
        place, rest = int(tensor.storage_offset()), number
        for size, stride in sizes_and_strides:
            rest, index = divmod(rest, size)
            place += index * stride
        found.append(place)
    return found
