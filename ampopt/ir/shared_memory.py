"""Copies of NumPy arrays and tensors that have memory in common, which have theirs in common.

`copy.deepcopy` copies each array for itself: `self.view = self.gain.numpy()`, `torch.from_numpy(self.drawn)`
and `self.row = self.table[1]` would be apart in a copy, and what is written to one not be seen in the other.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampopt.ir.parts import walk

ALIGNED = 64
"""Bytes to which memory of both libraries is aligned."""

_copied_tensors: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Tensors that have memory in common with arrays, by identity."""


def copies_in_common(root: Any, known: Mapping[Any, Any]) -> dict[int, Any]:
    """Copies of what below a root has memory in common with an array, by the identity of the original.

    What has memory in common with a tensor whose copy is `known`, and has the same memory, is shared. Arrays
    of other classes and of objects, and tensors that are results, are copied each for itself. Raises
    TypeError where something was copied before without what it has memory in common with.
    """
    found = dict[int, Any]()
    for group in _groups(root):
        before = [each for each in group if id(each.value) in known]
        if not before:
            found.update(_copied(group))
        elif all(_is_shared(each.value, known[id(each.value)]) for each in before):
            found.update({id(each.value): each.value for each in group if each not in before})
            tensors = [known[id(each.value)] for each in before]
            _copied_tensors.update({id(each): each for each in tensors if isinstance(each, Tensor)})
        elif len(before) < len(group):
            raise TypeError(f"{before[0].name} was copied without what it has memory in common with")
    return found


def memory_of_arrays(tensor: Tensor) -> Any:
    """The memory of a copied tensor as an array of bytes if arrays have it, too; else None."""
    if _copied_tensors.get(id(tensor)) is not tensor:
        return None
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


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
        if type(value) in (np.ndarray, np.memmap) and value.nbytes and not value.dtype.hasobject:
            yield _Holder(*_bounds(value), path, value)
        elif type(value) in (Tensor, nn.Parameter) and _can_be_placed(value):
            memory = value.untyped_storage()
            yield _Holder(memory.data_ptr(), memory.data_ptr() + memory.nbytes(), path, value)


def _can_be_placed(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_leaf:
        return False
    if is_lazy(tensor) or tensor.is_neg() or tensor.is_conj() or tensor.is_quantized:
        return False
    try:
        memory = tensor.untyped_storage()
        return bool(memory.nbytes()) and memory.data_ptr() % tensor.itemsize == 0 and memory.data_ptr() > 0
    except (RuntimeError, NotImplementedError):  # a tensor without numbers
        return False


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
    if isinstance(value, np.ndarray):
        place = value.__array_interface__["data"][0] + shift
        made: Any = np.ndarray(value.shape, value.dtype, memory.numpy(), place, value.strides)
        made.flags.writeable = value.flags.writeable
        return made
    begin = (value.untyped_storage().data_ptr() + shift) // value.itemsize + value.storage_offset()
    laid = torch.empty(0, dtype=value.dtype)
    laid.set_(memory.untyped_storage(), begin, value.shape, value.stride())
    is_weight = isinstance(value, nn.Parameter)
    own = nn.Parameter(laid, value.requires_grad) if is_weight else laid.requires_grad_(value.requires_grad)
    _copied_tensors[id(own)] = own
    return own
