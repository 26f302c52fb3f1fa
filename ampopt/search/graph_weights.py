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

MOST_OF_A_VECTOR = 4096
"""Number of values of a vector that are compared in each call."""

SAMPLED = 16
"""Number of values of another weight that are compared in each call, from its middle: the first rows may be
padding, which no optimizer changes."""


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
        self._sampled = [sample for tensor in weights.values() if (sample := _sample(tensor)) is not None]
        self._samples = torch.cat(self._sampled) if self._sampled else None

    def are_now(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a call's inputs have these tensors at their places, and nothing was written to them."""
        if not all(weight.is_now(inputs[weight.place]) for weight in self._weights):
            return False
        if self._samples is None or (self._samples.is_cuda and torch.cuda.is_current_stream_capturing()):
            return True  # the host cannot wait for values while it captures
        return torch.equal(torch.cat(self._sampled), self._samples)


def _sample(tensor: Tensor) -> Tensor | None:
    """The bytes of a few values of a tensor, in its own memory; None if they are not one after another."""
    if tensor.is_quantized or not tensor.numel():
        return None
    tensor = tensor.detach()
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    most = MOST_OF_A_VECTOR if tensor.dim() <= 1 else SAMPLED
    count = min(most, tensor.numel())
    first = tensor.storage_offset() + (tensor.numel() - count) // 2
    return tensor.as_strided((count,), (1,), first).view(torch.uint8)
