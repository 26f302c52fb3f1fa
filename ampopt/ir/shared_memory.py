"""Copies of NumPy arrays and tensors that have memory in common, which have theirs in common.

`copy.deepcopy` copies each array for itself: `self.view = self.gain.numpy()`, `torch.from_numpy(self.drawn)`
and `self.row = self.table[1]` would be apart in a copy, and what is written to one not be seen in the other.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ampopt.ir.parts import walk

ALIGNED = 64
"""Bytes to which memory of both libraries is aligned."""


def copies_in_common(root: Any, known: Mapping[Any, Any]) -> dict[int, Any]:
    """Copies of what below a root has memory in common with an array, by the identity of the original.

    What has memory in common with a tensor whose copy is `known`, and has the same memory, is shared. Raises
    TypeError for kinds of arrays and tensors that cannot be copied so.
    """
    found = dict[int, Any]()
    for group in _groups(root):
        before = [each for each in group if id(each.value) in known]
        if not before:
            found.update(_copied(group))
        elif all(_is_shared(each.value, known[id(each.value)]) for each in before):
            found.update({id(each.value): each.value for each in group if each not in before})
        elif len(before) < len(group):
            raise TypeError(f"{before[0].name} was copied without what it has memory in common with")
    return found


def memory_of_arrays(tensor: Tensor) -> Any:
    """The memory of a tensor of the CPU as an array of bytes if arrays may have it, too; else None.

    PyTorch marks it, as it must not resize it: that of `tensor.numpy()` and of `torch.from_numpy(array)`.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    try:
        memory = tensor.untyped_storage()
        if memory.resizable() or not memory.data_ptr():
            return None
        return torch.empty(0, dtype=torch.uint8).set_(memory).numpy()
    except (RuntimeError, NotImplementedError):  # a tensor without numbers
        return None


@dataclasses.dataclass(frozen=True, order=True)
class _Holder:
    """An array or a tensor, and the addresses that its memory begins and ends at."""

    begin: int
    end: int
    path: str
    value: Any = dataclasses.field(compare=False)

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return self.path.removeprefix(".") or "it"


def _groups(root: Any) -> Iterator[list[_Holder]]:
    """What overlaps, together; of groups without an array PyTorch keeps the memory in common."""
    group, end = list[_Holder](), 0
    for holder in sorted(_holders(root)):
        if holder.begin >= end:
            yield from _with_arrays(group)
            group = []
        group.append(holder)
        end = max(end, holder.end)
    yield from _with_arrays(group)


def _with_arrays(group: list[_Holder]) -> Iterator[list[_Holder]]:
    if len(group) > 1 and any(isinstance(each.value, np.ndarray) for each in group):
        yield group


def _holders(root: Any) -> Iterator[_Holder]:
    for path, value in walk(root, code=False, classes=False):
        if isinstance(value, np.ndarray) and value.nbytes:
            yield _Holder(*_bounds(value), path, value)
        elif isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu":
            try:
                memory = value.untyped_storage()
                begin, size = memory.data_ptr(), memory.nbytes()
            except (RuntimeError, NotImplementedError):  # a tensor without numbers
                continue
            if begin and size:
                yield _Holder(begin, begin + size, path, value)


def _is_shared(value: Any, copied: Any) -> bool:
    """Whether a copy is the original, or a tensor of its memory."""
    if isinstance(value, Tensor) and isinstance(copied, Tensor):
        return value.untyped_storage().data_ptr() == copied.untyped_storage().data_ptr()
    return value is copied


def _bounds(array: Any) -> tuple[int, int]:
    """The addresses of an array's first byte, and behind its last."""
    begin = end = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        begin += min(0, (size - 1) * stride)
        end += max(0, (size - 1) * stride)
    return begin, end + array.itemsize


def _copied(group: list[_Holder]) -> dict[int, Any]:
    begin = min(each.begin for each in group)
    size, before = max(each.end for each in group) - begin, begin % ALIGNED
    memory = torch.empty(before + size, dtype=torch.uint8)
    ctypes.memmove(memory.data_ptr() + before, begin, size)
    return {id(each.value): _placed(each, memory, before - begin) for each in group}


def _placed(holder: _Holder, memory: Tensor, shift: int) -> Any:
    """The array or the tensor in other memory, in which an address is so many bytes behind the beginning."""
    value = holder.value
    if type(value) is np.ndarray and not value.dtype.hasobject:
        place = value.__array_interface__["data"][0] + shift
        made: Any = np.ndarray(value.shape, value.dtype, memory.numpy(), place, value.strides)
        made.flags.writeable = value.flags.writeable
        return made
    is_plain = type(value) in (Tensor, nn.Parameter) and value.is_leaf
    if not is_plain or value.is_neg() or value.is_conj():
        raise TypeError(f"{holder.name} has memory in common with an array")
    place, rest = divmod(value.untyped_storage().data_ptr() + shift, value.itemsize)
    if rest:
        raise TypeError(f"{holder.name} begins in the middle of an element of its memory")
    laid = torch.empty(0, dtype=value.dtype).set_(
        memory.untyped_storage(), place + value.storage_offset(), value.shape, value.stride()
    )
    if isinstance(value, nn.Parameter):
        return nn.Parameter(laid, value.requires_grad)
    return laid.requires_grad_(value.requires_grad)
