"""How the results of a graph lie in memory: in memory of their own, or as views of inputs or other results.

Code that runs after a graph may write to its results, or depend on their strides. Results that are optimized
get the strides that they had; views are made anew in each call, with the same sizes, strides and offset. For
static sizes and strides of the inputs, which Dynamo guards, a graph's views do not depend on values.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ampopt.errors import CaptureError


@dataclasses.dataclass(frozen=True)
class Own:
    """A result in memory of its own; `strides` are None if it is contiguous."""

    strides: tuple[int, ...] | None

    @classmethod
    def of(cls, result: Tensor) -> Own:
        """The strides of a result. Raises CaptureError where its elements overlap, other than by `expand`."""
        if result.is_contiguous():
            return cls(None)
        once = _once(result, result.stride())
        if _elements(once).sum() != once.numel():
            raise CaptureError("elements of a result of it share memory")
        return cls(result.stride())

    def laid_out(self, result: Tensor) -> Tensor:
        """A result with these strides; what `expand` has repeated is repeated in the same way."""
        if self.strides is None or result.stride() == self.strides:
            return result
        once = _once(result, self.strides)
        kept = once.new_empty_strided(once.shape, self.strides).copy_(once)
        return kept.as_strided(result.shape, self.strides)


def _once(result: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Every element of a result with these strides once."""
    return result[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]


def _elements(tensor: Tensor) -> Tensor:
    """Which of the places of its memory are elements of a tensor."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    places = torch.zeros(count, dtype=torch.bool, device="cpu")
    places.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(True)
    return places


@dataclasses.dataclass(frozen=True)
class View:
    """A result whose elements are elements of an input or of an earlier result, its base.

    `place`: the base's, among the inputs or the results; `offset`: from the base's first element on.
    """

    is_of_input: bool
    place: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, base: Tensor) -> Tensor:
        """The view of a base that lies as the one did that this was made for."""
        return base.as_strided(self.size, self.strides, base.storage_offset() + self.offset)


class Layout:
    """The layout of all results of a graph."""

    def __init__(self, results: Sequence[Own | View]) -> None:
        """`results`: one of each; the base of a view that is a result comes before the view."""
        self._results = tuple(results)
        self.own = tuple(place for place, each in enumerate(results) if isinstance(each, Own))
        self.is_plain = all(each == Own(None) for each in results)

    def laid_out(self, own: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All results, from those in memory of their own and from the graph's inputs."""
        if self.is_plain:
            return tuple(own)
        given, results = iter(own), list[Tensor]()
        for each in self._results:
            if isinstance(each, Own):
                results.append(each.laid_out(next(given)))
            else:
                results.append(each.of((inputs if each.is_of_input else results)[each.place]))
        return tuple(results)


def layout_of(inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Layout:
    """The layout of a graph's results, as a call with these inputs gave them.

    Raises CaptureError where a result shares some elements with another tensor, and has others of its own, or
    reads another's memory as another dtype.
    """
    found = list[Own | View]()
    for place, result in enumerate(results):
        candidates = [(True, index, each) for index, each in enumerate(inputs)]
        candidates += [(False, i, results[i]) for i in range(place) if isinstance(found[i], Own)]
        views = (_view(result, *candidate) for candidate in candidates)
        found.append(next(filter(None, views), None) or Own.of(result))
    return Layout(found)


def _view(result: Tensor, is_of_input: bool, place: int, base: Tensor) -> View | None:
    """The view of a base that a result is; None if they have no element in common."""
    storage = result.untyped_storage()
    if not result.numel() or storage.data_ptr() != base.untyped_storage().data_ptr():
        return None
    kind = (result.dtype, result.is_conj(), result.is_neg())
    if kind != (base.dtype, base.is_conj(), base.is_neg()):
        raise CaptureError("a result of it is a view of another tensor with another dtype")
    shared = _elements(base).as_strided(result.size(), result.stride(), result.storage_offset())
    if not shared.any():
        return None
    if not shared.all():
        raise CaptureError("a result of it shares a part of its memory with another tensor")
    offset = int(result.storage_offset() - base.storage_offset())
    return View(is_of_input, place, tuple(result.size()), result.stride(), offset)


def joined(results: Sequence[Tensor], *, but: Collection[tuple[int, int]] = ()) -> set[tuple[int, int]]:
    """The pairs of results, by their places, of which a write to one may change the other, without `but`.

    Parts of one memory may lie beside each other, or in turn, as those of `unbind`.
    """
    memories = dict[tuple[torch.device, int], list[int]]()
    for place, result in enumerate(results):
        if _has_memory(result) and not result.is_nested:
            memories.setdefault((result.device, result.untyped_storage().data_ptr()), []).append(place)
    found = set[tuple[int, int]]()
    for places in memories.values():
        ends = {place: _end(results[place]) for place in places}
        pairs = {
            (one, other)
            for one, other in itertools.combinations(places, 2)
            if min(ends[one], ends[other]) > max(results[one].data_ptr(), results[other].data_ptr())
        }.difference(but)
        found |= {(one, other) for one, other in pairs if results[one].dtype is not results[other].dtype}
        for dtype in {results[place].dtype for place in itertools.chain(*pairs)}:
            alike = {place for place in itertools.chain(*pairs) if results[place].dtype is dtype}
            found |= pairs & _sharing_elements({place: results[place] for place in sorted(alike)})
    return found


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one memory."""
    if not _has_memory(a) or not _has_memory(b) or a.device != b.device:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _sharing_elements(parts: Mapping[int, Tensor]) -> set[tuple[int, int]]:
    """The pairs of parts of one memory, all of one dtype, that have elements in common.

    Each element is marked with the parts before that have it: it takes as long as to write to each part.
    """
    first, size = min(parts.values(), key=Tensor.storage_offset), next(iter(parts.values())).element_size()
    span = (max(map(_end, parts.values())) - first.data_ptr()) // size
    marks = torch.zeros(span, dtype=torch.int32, device="cpu")
    owners, found = [tuple[int, ...]()], set[tuple[int, int]]()
    for place, part in parts.items():
        offset = part.storage_offset() - first.storage_offset()
        its = _once(marks.as_strided(part.size(), part.stride(), offset), part.stride())
        low, high = its.aminmax()
        old = low.reshape(1) if low == high else its.unique()
        found |= {(owner, place) for mark in old.tolist() for owner in owners[mark]}
        if low == high:  # in most cases; then nothing is looked up
            its.fill_(len(owners))
        else:
            its.copy_(torch.searchsorted(old, its.contiguous()) + len(owners))
        owners += [(*owners[mark], place) for mark in old.tolist()]
    return found


def _end(tensor: Tensor) -> int:
    """The address behind a tensor's last element."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (steps + 1) * tensor.element_size()
