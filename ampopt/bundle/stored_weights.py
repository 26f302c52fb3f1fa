"""Stores weights as named contiguous tensors, which is all that safetensors supports, with their strides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt.bundle.stored_values import (
    DTYPES,
    array,
    decode_value,
    encode_value,
    integer,
    members,
    refuse,
    text,
)
from ampopt.errors import ExportError

_STORED = {dtype for dtype in DTYPES.values() if not dtype.is_complex}
"""The dtypes of a program that every version of safetensors knows."""


def write_weights(
    weights: Mapping[str, Tensor], device: torch.device, file: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A table of weights as JSON, and the tensors that it refers to: contiguous, on the CPU, own memory.

    Weights with the same memory, shape and strides are stored as one tensor. The order of a weight's elements
    in memory (channels_last, a transposed matrix) goes into the table as strides, because kernels for another
    order may sum in another order; gaps and repetitions (a slice, an expanded tensor) are not kept. Raises
    ExportError for sparse, quantized and complex weights, and for those on a third device.
    """
    table: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[object, str] = {}
    for name, weight in weights.items():
        where = f"{file}, weight {name!r}"
        if weight.layout is not torch.strided or weight.dtype not in _STORED:
            raise ExportError(f"{where}: a file cannot hold a {weight.layout} tensor of {weight.dtype}")
        view = (weight.untyped_storage().data_ptr(), weight.storage_offset(), weight.dtype)
        stored = names.setdefault((*view, weight.shape, weight.stride()), name)
        if stored == name:
            tensors[name] = weight.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        kept = weight if _is_dense(weight.shape, weight.stride()) else tensors[stored]
        table[name] = {
            "tensor": stored,
            "strides": list(kept.stride()),
            "device": encode_value(weight.device, device, where),
        }
    return table, tensors


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """One weight of a table: the name of its stored tensor, with its strides, dtype and device."""

    tensor: Tensor
    strides: tuple[int, ...]
    device: torch.device

    def without_memory(self) -> Tensor:
        """A tensor of this shape, dtype and strides: fake in a fake tensor mode, uninitialized elsewhere."""
        return torch.empty_strided(
            self.tensor.shape, self.strides, dtype=self.tensor.dtype, device=self.device
        )

    def load(self) -> Tensor:
        """The weight; the stored tensor itself if its layout and device fit already."""
        if self.tensor.stride() == self.strides:
            return self.tensor.to(self.device)
        return self.without_memory().copy_(self.tensor)


def read_weights(
    table: object, tensors: Mapping[str, Tensor], device: torch.device, file: str
) -> dict[str, StoredWeight]:
    """The weights that a table written by `write_weights` describes, for a program on `device`.

    Raises BundleError if a tensor is missing or not in the table, or if the strides are not an order of the
    tensor's elements without gaps.
    """
    if not isinstance(table, dict):
        refuse(f"{file}, weights", "expected an object")
    weights: dict[str, StoredWeight] = {}
    used = set()
    for name, data in table.items():
        where = f"{file}, weight {name[:100]!r}"
        stored, strides, place = members(data, ("tensor", "strides", "device"), where)
        used.add(text(stored, where))
        if stored not in tensors:
            refuse(where, f"its tensor {stored[:100]!r} is missing from the weights' file")
        weight = StoredWeight(
            tensors[stored],
            tuple(integer(stride, where) for stride in array(strides, where)),
            decode_value(place, device, where),
        )
        if not isinstance(weight.device, torch.device) or weight.tensor.dtype not in _STORED:
            refuse(where, f"a tensor of {weight.tensor.dtype} on {weight.device} cannot be a weight")
        if not _is_dense(weight.tensor.shape, weight.strides):
            refuse(where, f"strides {list(weight.strides)} do not fit shape {list(weight.tensor.shape)}")
        weights[name] = weight
    for name in tensors.keys() - used:
        refuse(f"{file}, weights", f"the weights' file holds {name[:100]!r}, which no weight refers to")
    return weights


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides put the elements of a tensor into memory one after another, in whatever order.

    The stride of a dimension of size 1 says nothing, but is kept: PyTorch guesses memory formats from it.
    """
    if len(shape) != len(strides) or any(stride < 0 for stride in strides):
        return False
    expected = 1
    for stride, size in sorted((d, n) for n, d in zip(shape, strides, strict=True) if n != 1):
        if stride != expected and 0 not in shape:
            return False
        expected *= size
    return True
